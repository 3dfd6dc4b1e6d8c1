"""Debian's Slurm on this machine: munged, slurmctld, and two slurmd with a processor each, as root and without cgroups."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import release_debian

from pipeline.daemon import debian

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "slurm"
NODES = ("n0", "n1")
# Without a partition of higher priority nothing is preempted; what waits in `closed` is never started.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=3600
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=cells Nodes=ALL Default=YES
PartitionName=urgent Nodes=ALL PriorityTier=10
PartitionName=closed Nodes=ALL State=DOWN
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000 {more}\n"


@dataclass(frozen=True)
class Slurm:
    """A cluster; `env` is what its commands need."""

    folder: Path
    env: Mapping[str, str]

    def call(self, *words: object, env: Mapping[str, str] | None = None, fails: bool = False) -> str:
        """Run a command that must end well, or must not; return what it printed."""
        done = subprocess.run(
            list(map(str, words)), env={**self.env, **(env or {})}, capture_output=True, text=True, check=False,
            timeout=600, cwd=self.folder,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, matrix: Path, env: Mapping[str, str]) -> tuple[Path, list[str]]:
        """Submit a matrix; return the folder of this submission, and the numbers of its jobs, that of `finish` last."""
        before = set((matrix.parent / "releases").glob("*"))
        said = self.call(EXAMPLES / "submit", matrix, matrix.parent / "releases", env=env)
        (work,) = set((matrix.parent / "releases").iterdir()) - before
        return work, re.findall(r"^job (\d+):", said, re.MULTILINE)

    def job(self, number: str) -> dict[str, str]:
        """What the controller says of a job or of one task of an array."""
        said = self.call("scontrol", "show", "job", number, "--oneliner")
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def queue(self) -> dict[str, tuple[str, str]]:
        """State and reason of every job and task that is not over."""
        rows = [line.split("|") for line in self.call("squeue", "--array", "-h", "-o", "%i|%T|%r").splitlines()]
        return {number: (state, reason) for number, state, reason in rows}

    def hurry(self) -> None:
        """Slurm lets what was requeued wait for two minutes: let it start in some seconds.

        Not at once: a node takes no job in the second in which it ended it ("already killed, do not launch"; seen).
        """
        for number, (state, reason) in self.queue().items():
            if (state, reason) != ("PENDING", "BeginTime"):
                continue
            begins = self.job(number)["EligibleTime"]
            if begins != "Unknown" and datetime.fromisoformat(begins) - datetime.now() > timedelta(seconds=10):
                update = ["scontrol", "update", f"JobId={number}", "StartTime=now+4"]
                subprocess.run(update, env=self.env, check=False, timeout=60)

    def until(self, reached: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so; nothing that was requeued waits for long."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"{self.queue()}\n{self.logs()}"
            self.hurry()
            time.sleep(0.5)

    def wait(self, seconds: float) -> None:
        """Until the queue is empty."""
        self.until(lambda: not self.queue(), seconds)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in held]


@contextmanager
def cluster(folder: Path, env: Mapping[str, str]) -> Iterator[Slurm]:
    """Start Slurm with its files below `folder`; end it with all its jobs on leaving."""
    release_debian.ensure("slurmctld", "slurmd", "sbatch", "munged", "jq")
    env = {name: value for name, value in env.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(NODES))
    (folder / "state").mkdir(parents=True)
    nodes = [
        NODE.format(name=name, host=host, port=port, more="Gres=gpu:h200:2" if name == "n0" else "")
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    (folder / "slurm.conf").write_text("".join(nodes) + CONFIG.format(host=host, port=ports[0], folder=folder))
    # Slurm asks for device files and does not use them here.
    (folder / "gres.conf").write_text(
        "NodeName=n0 Name=gpu Type=h200 File=/dev/null\nNodeName=n0 Name=gpu Type=h200 File=/dev/zero\n"
    )
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    with ExitStack() as stack:
        places = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munged.log",
            "seed-file": "munge.seed",
        }
        words = ["munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in places.items())]
        made = Slurm(folder, {**env, "SLURM_CONF": str(folder / "slurm.conf")})
        _start(stack, words, made)
        _start(stack, ["slurmctld", "-D", "-c"], made)
        for name in NODES:
            _start(stack, ["slurmd", "-D", "-N", name], made)
        deadline = time.monotonic() + 60
        while made.call("sinfo", "-h", "-N", "-p", "cells", "-o", "%T").split() != ["idle"] * len(NODES):
            assert time.monotonic() < deadline, made.logs()
            time.sleep(0.2)
        try:
            yield made
        finally:
            subprocess.run(["scancel", "--user=root", "--full"], env=made.env, check=False, timeout=60)
            made.wait(60)


def _start(stack: ExitStack, words: list[str], slurm: Slurm) -> None:
    program = debian.program(words[0])
    assert program is not None, words[0]
    log = stack.enter_context((slurm.folder / f"{words[0]}{words[-1] if '-N' in words else ''}.out.log").open("wb"))
    process = subprocess.Popen([program, *words[1:]], env=slurm.env, stdout=log, stderr=log, process_group=0)

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)

    stack.callback(end)
    if words[0] == "munged":
        deadline = time.monotonic() + 30
        while not (slurm.folder / "munge.socket").exists():
            assert time.monotonic() < deadline and process.poll() is None, slurm.logs()
            time.sleep(0.05)
