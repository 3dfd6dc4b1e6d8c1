"""GPUs of a host, told by stand-ins: what is offered, what is refused and with which remedy, and how steps get them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.contract.errors import BuildError, PipelineError, UsageError
from pipeline.daemon import Engine, engine_from
from pipeline.image.base import Base
from pipeline.image.containers import Ended
from pipeline.image.gpus import Gpu, Gpus, check, check_driver, offered
from pipeline.image.probe import _PLACES, _PROBE, BaseFacts, probe, read_gpus
from pipeline.image.replay import Here
from pipeline.image.resolve import _check_flashinfer, _offer, _refuse_hidden
from pipeline.image.session import Session

ROOT = Path(__file__).resolve().parents[2]
H200 = Gpu("NVIDIA H200", "GPU-1", "9.0", 4)
L4 = Gpu("NVIDIA L4", "GPU-2", "8.9", 4)


def engine(**info: Any) -> Engine:
    told = {"ServerVersion": "28.5.2", "OSType": "linux", "Architecture": "x86_64", "Runtimes": {"runc": {}}, **info}
    return engine_from("tcp://gpu-host:2375", "DOCKER_HOST", told, "1.51")


def cdi(*names: str) -> Engine:
    rows = [{"Source": "cdi", "ID": name} for name in names]
    return engine(CDISpecDirs=["/etc/cdi"], DiscoveredDevices=rows)


NVIDIA = engine(Runtimes={"runc": {}, "nvidia": {}})
ALL = cdi("nvidia.com/gpu=all", "nvidia.com/gpu=0", "nvidia.com/gpu=1")


@pytest.mark.parametrize(
    ("host", "wanted", "access", "devices"),
    [
        (engine(), "", "none", None),
        (ALL, "", "cdi", ("nvidia.com/gpu=all",)),
        (ALL, "nvidia.com/gpu=1", "cdi", ("nvidia.com/gpu=1",)),
        (ALL, "0, 1", "cdi", ("nvidia.com/gpu=0", "nvidia.com/gpu=1")),
        (cdi("nvidia.com/gpu=0"), "", "cdi", ("nvidia.com/gpu=0",)),
        (NVIDIA, "", "runtime", ()),
        (NVIDIA, "1", "runtime", ("1",)),
        (NVIDIA, "all", "runtime", ()),
        (replace(ALL, default_runtime="nvidia"), "all", "default-runtime", None),
        (replace(ALL, default_runtime="nvidia"), "1", "cdi", ("nvidia.com/gpu=1",)),
        (engine(Runtimes={"nvidia": {}}, CDISpecDirs=["/etc/cdi"]), "nvidia.com/gpu=1", "runtime", ("1",)),
        (engine(DefaultRuntime="nvidia", Runtimes={"nvidia": {}}, CDISpecDirs=["/etc/cdi"]), "1", "runtime", ("1",)),
        (engine(DefaultRuntime="nvidia", Runtimes={"nvidia": {}}), "", "default-runtime", None),
    ],
)
def test_what_an_engine_offers(host: Engine, wanted: str, access: str, devices: tuple[str, ...] | None) -> None:
    found = offered(host, wanted=wanted)
    assert found.access == access
    assert devices is None or found.devices == devices


@pytest.mark.parametrize("wanted", ["nvidia.com/gpu=7", "7", "a b", ",", "nvidia.com/gpu=", "amd.com/gpu=0", "-1"])
def test_a_device_that_does_not_exist_is_named(wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        offered(ALL, wanted=wanted)
    assert "gpu=" in caught.value.hint
    assert int(caught.value.exit_code) == 2


def session(host: Engine = ALL, home: Path = Path()) -> Session:
    client: Any = None
    return Session(host, client, home, home / "log")


def test_gpus_are_not_chosen_for_a_cpu_and_no_engine_is_looked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert main(["build", "tiny", "--device", "cpu", "--gpus", "0"]) == 2
    assert "DEVICE=cpu uses none" in capsys.readouterr().err
    request: Any = SimpleNamespace(device="cpu")
    assert _offer(request, session()) == Gpus()


@pytest.mark.parametrize(
    ("installed", "fine"), [("0.6.16.post3", True), ("0.6.16.post3+cu130", True), ("0.7.4", False)]
)
def test_a_plan_for_another_flashinfer_is_refused_before_anything_is_built(installed: str, fine: bool) -> None:
    plan: Any = SimpleNamespace(flashinfer_version="0.6.16.post3")
    if fine:
        _check_flashinfer(plan, (), installed)
        return
    with pytest.raises(UsageError, match="the plan is for FlashInfer"):
        _check_flashinfer(plan, (), installed)


def facts(**more: Any) -> BaseFacts:
    return BaseFacts("3.12", "x86_64", (2, 39), {"torch": "2.13.0", "flashinfer-python": "0.6.16"}, **more)


def test_a_mount_of_the_gpu_runtime_that_hides_what_is_baked_is_refused_before_anything_is_timed() -> None:
    base = Base("serve:1", "sha256:1", "given", "", {})
    mounted = facts(
        mounts=("/", "/proc", "/usr/local/nvidia", "/etc/hosts"), flashinfer="/usr/local/nvidia/py/flashinfer"
    )
    with pytest.raises(UsageError, match="every container with a GPU has a mount at /usr/local/nvidia") as caught:
        _refuse_hidden(mounted, [mounted.flashinfer], base)
    assert "--no-bake-jit" in caught.value.hint
    assert "RETUNE" not in caught.value.hint
    _refuse_hidden(mounted, ["/opt/flashinfer_autotune_cache", "/usr/local/nvidia2/x"], base)


def test_containers_get_the_gpus_that_were_chosen() -> None:
    chosen = Gpus("cdi", devices=("nvidia.com/gpu=0", "nvidia.com/gpu=1"))
    (request,) = chosen.options()["device_requests"]
    assert request["DeviceIDs"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
    (request,) = Gpus("runtime", devices=("1",)).options()["device_requests"]
    assert (request["DeviceIDs"], request["Count"]) == (["1"], 0)
    (request,) = Gpus("runtime", devices=()).options()["device_requests"]
    assert request["Count"] == -1
    assert Gpus().options() == {}


@pytest.mark.parametrize(
    ("gpus", "ranks", "message", "remedy"),
    [
        ((), 1, "sees no GPU", "DEVICE=cpu"),
        ((H200,), 2, "2 ranks need 2 GPUs, the Docker Engine has 1", "TP=1"),
        ((H200,) * 3, 4, "4 ranks need 4 GPUs, the Docker Engine has 3", "TP=2"),
        ((H200, L4), 1, "NVIDIA H200, NVIDIA L4", "GPUS=0,1"),
        ((H200, H200, L4), 2, "differ", "GPUS="),
        ((replace(H200, mig=True),) * 2, 2, "MIG mode", "nvidia-smi -mig 0"),
        ((replace(H200, memory_used=9000),), 1, "9000 MiB", "nvidia-smi"),
    ],
)
def test_gpus_that_cannot_serve_are_refused(gpus: tuple[Gpu, ...], ranks: int, message: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        check(Gpus("cdi", gpus=gpus), ranks, require_idle=True)
    assert remedy in caught.value.hint
    assert int(caught.value.exit_code) == 2


def test_a_busy_gpu_and_a_slice_are_warnings_unless_refused() -> None:
    (said,) = check(Gpus("cdi", gpus=(replace(H200, memory_used=9000),)), 1, require_idle=False)
    assert "unreliable" in said
    (line,) = check(Gpus("cdi", gpus=(replace(H200, mig=True),)), 1, require_idle=True)
    assert "GPUS=" in line
    assert check(Gpus("cdi", gpus=(H200, H200)), 2, require_idle=True) == []


def test_a_driver_older_than_the_image_s_cuda_is_refused() -> None:
    old = Gpus("cdi", gpus=(H200,), driver="550.54.15", cuda=(12, 4))
    with pytest.raises(UsageError, match=r"CUDA 13\.0\.3, and driver 550\.54\.15 runs CUDA up to 12\.4") as caught:
        check_driver(old, "13.0.3")
    assert "580" in caught.value.hint
    check_driver(old, "12.9")  # minor versions run on each other's drivers
    check_driver(old, "")
    check_driver(replace(old, cuda=None), "13.0")


SMI = {
    "gpus": [["NVIDIA H200", "GPU-1", "9.0", "3", "580.1", "Disabled"], ["NVIDIA H200", "GPU-2", "9.0", "x", "580.1", "[N/A]"]],
    "processes": [["GPU-1", "7", "python", "3"]],
}  # fmt: skip


def test_what_nvidia_smi_says_is_read() -> None:
    found = read_gpus({**SMI, "driver_cuda": [13, 0]}, ALL and offered(ALL))
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA H200"] * 2
    assert (found.driver, found.cuda, found.gpus[0].arch) == ("580.1", (13, 0), "90a")
    assert found.facts() == {"gpus": ["NVIDIA H200"] * 2, "count": 2, "driver": "580.1"}
    assert read_gpus({}, offered(ALL)).gpus == ()


BASE = Base("base", "sha256:1", "given", "", {})


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=9", UsageError),
        ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0, please update", UsageError),
        ('unknown or invalid runtime name: runtime "nvidia"', UsageError),
        # Engine 26.1.5 and its runc, for a CDI specification whose files are gone
        ('error mounting "/usr/lib/libcuda.so.535" to rootfs: stat: no such file or directory', UsageError),
        ('exec: "python3": executable file not found in $PATH', UsageError),
        ("toomanyrequests", BuildError),
    ],
)
def test_an_engine_s_refusal_is_named(
    said: str, error: type[PipelineError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from docker.errors import APIError

    def refuse(*_words: Any, **_more: Any) -> Ended:
        raise APIError("500", explanation=said)

    monkeypatch.setattr("pipeline.image.probe.run_one", refuse)
    with pytest.raises(error) as caught:
        probe(session(home=tmp_path), BASE, offered(ALL))
    assert caught.value.hint


TOLD: dict[str, Any] = {
    "python": "3.12", "machine": "aarch64", "libc": ["glibc", "2.36"], "venv": True, "compiler": False, "cuda": "",
    "packages": {"torch": "2.11.0", "flashinfer-python": "0.6.16.post3"}, "flashinfer": "/x", "mounts": ["/"],
    "cpuinfo": "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": "3.9"}, r"is 3\.9; 3\.11 or newer"),
        ({"python": "3.10"}, r"is 3\.10; 3\.11 or newer"),
        ({"libc": ["", ""]}, "not built on glibc"),
        ({"venv": False, "packages": {"torch": "", "flashinfer-python": ""}}, "no venv module"),
        ({}, ""),
        ({"python": "4.0"}, ""),
    ],
)
def test_a_base_that_cannot_carry_what_we_ship_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.image.probe.run_one", lambda *_w, **_m: Ended(0, json.dumps({**TOLD, **change}), ()))
    if message:
        with pytest.raises(UsageError, match=message):
            probe(session(home=tmp_path), BASE, Gpus())
        return
    found, _ = probe(session(home=tmp_path), BASE, Gpus())
    assert found.processor["model"] == "CPU implementer 0x41, CPU part 0xd0c"
    assert found.processor["count"] == 2
    monkeypatch.setattr("pipeline.image.probe.run_one", None)
    assert probe(session(home=tmp_path), BASE, Gpus())[0] == found, "remembered"


def test_a_cpu_key_is_replayed_by_the_engine_s_processor_and_machine_not_by_the_client_s() -> None:
    cpu = {"model": "CPU implementer 0x41, CPU part 0xd0c", "flags": "f", "threads": "1"}
    record = SimpleNamespace(arch="cpu-aarch64", host=SimpleNamespace(cpu=cpu, gpus=()))
    manifest: Any = SimpleNamespace(key="0.6.16/cpu-aarch64/a", record=record)
    assert Here(Gpus(), {"model": cpu["model"], "flags": "f", "count": 4}, "aarch64").has(manifest)
    assert not Here(Gpus(), {"model": cpu["model"], "flags": "f", "count": 4}, "x86_64").has(manifest)
    assert not Here(Gpus(), {"model": cpu["model"], "flags": "g", "count": 4}, "aarch64").has(manifest)


def test_what_runs_in_a_base_keeps_to_the_oldest_python_s_syntax() -> None:
    for text in (_PROBE, _PLACES):
        ast.parse(text, feature_version=(3, 8))
