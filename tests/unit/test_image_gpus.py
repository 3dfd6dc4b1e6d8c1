"""GPUs of a host, told by stand-ins: what is offered, what is refused and with which remedy, and how steps get them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_samples import write

from pipeline.contract.errors import PipelineError
from pipeline.daemon import Engine, engine_from
from pipeline.image import devicerun
from pipeline.image.buildkit import Builder, Stage
from pipeline.image.contain import Ended
from pipeline.image.facts import BaseFacts, probe, read_gpus
from pipeline.image.gpus import (
    BusyGpu,
    CdiUnknown,
    DriverTooOld,
    Gpu,
    Gpus,
    MigRanks,
    MixedGpus,
    NoGpu,
    TooFewGpus,
    check,
    check_driver,
    offered,
)  # fmt: skip
from pipeline.image.refusals import BaseWithoutPython, GpuFilesGone, ProbeFailed
from pipeline.run import run

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
    with pytest.raises(CdiUnknown) as caught:
        offered(ALL, wanted=wanted)
    assert "gpu=" in caught.value.hint
    assert int(caught.value.exit_code) == 2


def test_gpus_are_not_chosen_for_a_plan_on_a_cpu() -> None:
    from pipeline.image.prepare import GpusForCpu, _offer

    request: Any = type("Request", (), {"device": "cpu", "gpus": "0"})
    with pytest.raises(GpusForCpu, match="DEVICE=cpu uses none"):
        _offer(request, ALL)
    request.gpus = ""
    assert _offer(request, ALL) == Gpus()


@pytest.mark.parametrize(("base", "fine"), [("", True), ("0.6.16.post3+cu130", True), ("0.7.4", False)])
def test_another_flashinfer_is_refused_before_anything_is_built(base: str, fine: bool, tmp_path: Path) -> None:
    """A plan for one, and caches of one: they are the user's after a bump, and of no use to the new image."""
    from pipeline.image.caches import OtherFlashInfer
    from pipeline.image.prepare import OtherFlashInferPlanned, _check_flashinfer

    packages = {"torch": "2.11.0" if base else "", "flashinfer-python": base}
    facts = BaseFacts("sha256:1", "3.12", "x86_64", (2, 36), packages)
    plan: Any = type("Plan", (), {"flashinfer_version": "0.6.16.post3"})
    versions: Any = {"FLASHINFER_VERSION": "0.6.16.post3"}
    path = write(tmp_path / "root")
    if fine:
        _check_flashinfer(plan, (), facts, versions)
        _check_flashinfer(plan, (tmp_path / "root",), facts, versions)
        return
    with pytest.raises(OtherFlashInferPlanned, match=r"for FlashInfer 0\.6\.16\.post3, and the image has 0\.7\.4"):
        _check_flashinfer(plan, (), facts, versions)
    with pytest.raises(OtherFlashInfer) as caught:
        _check_flashinfer(plan, (tmp_path / "root",), facts, versions)
    assert caught.value.message == f"{path} was tuned with FlashInfer 0.6.16.post3, and the image has 0.7.4"
    assert "leave CACHE out" in caught.value.hint


@pytest.mark.parametrize(("inside", "fine"), [("0.6.16.post3", True), ("0.6.16.post3+cu130", True), ("0.7.4", False)])
def test_a_graft_of_another_flashinfer_is_refused_before_a_gpu_is_asked_for(
    inside: str, fine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    from pipeline.image import retune
    from pipeline.image.caches import OtherFlashInfer

    class Reached(Exception):
        """The check is behind us."""

    def reached(*_: object) -> None:
        raise Reached

    facts = BaseFacts("sha256:1", "3.12", "x86_64", (2, 36), {"torch": "2.11.0", "flashinfer-python": inside})
    path, anything = write(tmp_path / "root"), contextlib.nullcontext(Any)
    monkeypatch.setattr("pipeline.daemon.ensure", lambda **_: None)
    for name in ("check_present", "check_layout"):
        monkeypatch.setattr(retune, name, lambda *_: None)
    monkeypatch.setattr(retune, "connected", lambda *_: anything)
    monkeypatch.setattr(retune, "created", lambda *_: contextlib.nullcontext(type("C", (), {"get_archive": print})))
    monkeypatch.setattr(retune, "probe", lambda *_: (facts, None))
    monkeypatch.setattr(retune, "_how", reached)
    monkeypatch.setattr(retune, "log_file", lambda *_: tmp_path / "log")
    request: Any = type("Request", (), {"store": ""})
    with pytest.raises(Reached if fine else OtherFlashInfer) as caught:
        retune.graft("an/image:1", [tmp_path / "root"], request)
    if not fine:
        assert str(caught.value) == f"{path} was tuned with FlashInfer 0.6.16.post3, and the image has 0.7.4"
        assert "nothing was changed" in caught.value.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("caches", "said", "not_said"), [((), "RETUNE=1", "CACHE"), ((Path("root"),), "leave CACHE out", "RETUNE")]
)
def test_what_to_do_about_a_failed_verify_depends_on_where_the_cache_came_from(
    caches: tuple[Path, ...], said: str, not_said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.contract.verdict import Verdict
    from pipeline.image import flow
    from pipeline.image.outcome import Clock
    from pipeline.image.verify import VerifyFailed

    verdict = Verdict("sha256:1", "sha256:2", "", "", "", "static", "fail", findings=("one", "two"))
    monkeypatch.setattr(flow, "verify", lambda *_: verdict)
    monkeypatch.setattr(flow, "how_to_verify", lambda *_: None)
    plan, request = type("Plan", (), {"device": "cuda"}), type("Request", (), {"caches": caches, "max_wait": 1.0})
    ready = {"home": tmp_path, "two_bases": False, "plan": plan, "engine": None, "gpus": None, "client": None}
    prepared: Any = type("Prepared", (), ready)
    built: Any = type("Built", (), {"config_digest": "sha256:1", "image_id": "sha256:1"})
    with pytest.raises(VerifyFailed) as caught:
        flow._judge(request, prepared, built, Clock())  # type: ignore[arg-type]
    error = caught.value
    assert (error.message, error.details, int(error.exit_code)) == ("2 findings: one", ("one", "two"), 7)
    assert said in error.hint and not_said not in error.hint


def test_the_sdk_s_arguments_and_the_cli_s_words_agree() -> None:
    chosen = Gpus("cdi", devices=("nvidia.com/gpu=0", "nvidia.com/gpu=1"))
    (request,) = chosen.options()["device_requests"]
    assert request["DeviceIDs"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
    assert chosen.words() == ["--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=1"]
    (request,) = Gpus("runtime", devices=("1",)).options()["device_requests"]
    assert (request["DeviceIDs"], request["Count"]) == (["1"], 0)
    (request,) = Gpus("runtime", devices=()).options()["device_requests"]
    assert request["Count"] == -1
    assert Gpus("runtime", devices=()).words() == ["--gpus", "all"]
    assert Gpus().words() == []


@pytest.mark.parametrize(
    ("gpus", "ranks", "error", "message", "remedy"),
    [
        ((), 1, NoGpu, "sees no GPU", "DEVICE=cpu"),
        ((H200,), 2, TooFewGpus, "2 ranks need 2 GPUs, the engine offers 1", "TP=1"),
        ((H200,) * 3, 4, TooFewGpus, "4 ranks need 4 GPUs, the engine offers 3", "TP=2"),
        ((H200, L4), 1, MixedGpus, "NVIDIA H200, NVIDIA L4", "GPUS=0,1"),
        ((H200, H200, L4), 2, MixedGpus, "differ", "GPUS="),
        ((replace(H200, mig=True),) * 2, 2, MigRanks, "MIG mode", "nvidia-smi -mig 0"),
        ((replace(H200, memory_used=9000),), 1, BusyGpu, "9000 MiB", "end those processes"),
    ],
)
def test_gpus_that_cannot_serve_are_refused(
    gpus: tuple[Gpu, ...], ranks: int, error: type[PipelineError], message: str, remedy: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        check(Gpus("cdi", gpus=gpus, processes=("process 7 (python) holds 9000 MiB",)), ranks, require_idle=True)
    assert remedy in caught.value.hint
    assert int(caught.value.exit_code) == 2
    if error is BusyGpu:
        assert "process 7 (python) holds 9000 MiB" in caught.value.details


def test_a_busy_gpu_and_a_slice_are_warnings_unless_refused() -> None:
    busy = Gpus("cdi", gpus=(replace(H200, memory_used=9000),), processes=("process 7 (python) holds 9000 MiB",))
    said = check(busy, 1, require_idle=False)
    assert "may lie" in said[0]
    assert "process 7" in said[1]
    (line,) = check(Gpus("cdi", gpus=(replace(H200, mig=True),)), 1, require_idle=True)
    assert "GPUS=" in line
    assert check(Gpus("cdi", gpus=(H200, H200)), 2, require_idle=True) == []


def test_a_driver_older_than_the_image_s_cuda_is_refused() -> None:
    old = Gpus("cdi", gpus=(H200,), driver="550.54.15", cuda=(12, 4))
    with pytest.raises(DriverTooOld, match=r"CUDA 13\.0\.3, and driver 550\.54\.15 runs CUDA up to 12\.4") as caught:
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


class Client:
    """A docker SDK whose containers do not start."""

    def __init__(self) -> None:
        self.images = self
        self.id = "sha256:1"

    def get(self, _name: str) -> Client:
        return self


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=9", CdiUnknown),
        ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0, please update", DriverTooOld),
        ('could not select device driver "" with capabilities: [[gpu]]', NoGpu),
        ('unknown or invalid runtime name: runtime "nvidia"', NoGpu),
        ("nvidia-container-cli: device error: 9: unknown device", CdiUnknown),
        ("nvidia-container-cli: initialization error: nvml error: driver/library version mismatch", NoGpu),
        # Engine 26.1.5 and its runc, for a CDI specification whose files are gone
        (
            'error mounting "/usr/lib/libcuda.so.535" to rootfs at "/usr/lib/libcuda.so.535": stat '
            "/usr/lib/libcuda.so.535: no such file or directory",
            GpuFilesGone,
        ),
        (
            "CDI device injection failed: failed to inject devices: failed to stat CDI host device "
            '"/dev/nvidia0": no such file or directory',
            GpuFilesGone,
        ),
        ("error running hook #0: fork/exec /usr/bin/nvidia-ctk: no such file or directory", GpuFilesGone),
        ('exec: "python3": executable file not found in $PATH', BaseWithoutPython),
        ("toomanyrequests", ProbeFailed),
    ],
)
def test_an_engine_s_refusal_is_named(said: str, error: type[PipelineError], monkeypatch: pytest.MonkeyPatch) -> None:
    from docker.errors import APIError

    def refuse(*_words: Any, **_more: Any) -> Ended:
        raise APIError("500", explanation=said)

    monkeypatch.setattr("pipeline.image.facts.run_to_end", refuse)
    client: Any = Client()
    with pytest.raises(error) as caught:
        probe(client, "base", offered(ALL))
    assert caught.value.hint


@pytest.mark.parametrize(("python", "fine"), [("3.9", False), ("3.10", False), ("3.11", True), ("4.0", True)])
def test_a_base_whose_python_is_too_old_for_our_code_is_refused(
    python: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "python": python, "machine": "x86_64", "libc": ["glibc", "2.36"], "venv": True, "compiler": False, "cuda": "",
        "packages": {"torch": "2.11.0", "flashinfer-python": "0.6.16.post3"},
    }  # fmt: skip
    monkeypatch.setattr("pipeline.image.facts.run_to_end", lambda *_w, **_m: Ended(0, json.dumps(told), ()))
    client: Any = Client()
    if fine:
        assert probe(client, "base", Gpus())[0].python == python
        return
    with pytest.raises(BaseWithoutPython, match=rf"is {re.escape(python)}; 3\.11 or newer"):
        probe(client, "base", Gpus())


@pytest.mark.parametrize("allowed", [True, False])
def test_who_uses_a_busy_gpu_is_asked_among_the_host_s_processes(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from docker.errors import APIError

    told = {
        "python": "3.12", "machine": "x86_64", "libc": ["glibc", "2.36"], "venv": True, "compiler": False, "cuda": "",
        "packages": {"torch": "", "flashinfer-python": ""}, "processes": [],
        "gpus": [["NVIDIA H200", "GPU-1", "9.0", "9000", "580.1", "Disabled"]],
    }  # fmt: skip

    def run(_client: Any, _image: str, words: list[str], sandbox: Any, **_more: Any) -> Ended:
        if words[0] == "python3":
            assert "pid_mode" not in sandbox.options()
            return Ended(0, json.dumps(told), ())
        assert sandbox.options()["pid_mode"] == "host"
        if not allowed:
            raise APIError("400", explanation="cannot share the host PID namespace when user namespaces are enabled")
        return Ended(0, "GPU-1, 4711, python, 8996\n", ())

    monkeypatch.setattr("pipeline.image.facts.run_to_end", run)
    client: Any = Client()
    _, gpus = probe(client, "base", offered(ALL))
    assert gpus.processes == (("process 4711 (python) holds 8996 MiB",) if allowed else ())
    said = check(gpus, 1, require_idle=False)
    assert ("process 4711" in said[-1]) == allowed


def test_the_probe_runs_under_the_oldest_python_s_syntax() -> None:
    import ast

    from pipeline.image.facts import _PROBE

    ast.parse(_PROBE, feature_version=(3, 8))


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.overlay", "Dockerfile.cuda"])
def test_the_tuning_step_of_every_dockerfile_can_be_given_devices(name: str) -> None:
    plain = (ROOT / "docker" / name).read_bytes()
    made = devicerun.with_devices(plain, ("nvidia.com/gpu=0", "nvidia.com/gpu=1"))
    (line,) = [line for line in made.splitlines() if b"--device" in line]
    assert line.startswith(b"RUN --device=nvidia.com/gpu=0 --device=nvidia.com/gpu=1 --network=none --mount=type=bind,from=previous")  # fmt: skip
    assert made.replace(b"--device=nvidia.com/gpu=0 --device=nvidia.com/gpu=1 ", b"") == plain
    with pytest.raises(devicerun.NoTuningStep):
        devicerun.with_devices(b"FROM scratch\n", ("nvidia.com/gpu=all",))


def test_a_device_step_s_command_allows_devices_and_has_shared_memory(tmp_path: Path) -> None:
    text = (ROOT / "docker" / "Dockerfile.overlay").read_bytes()
    builder = Builder({}, text, tmp_path, tmp_path, tmp_path / "log")
    words = builder.command(Stage("tuned", {}, devices=("nvidia.com/gpu=all",), shm_size=1 << 30))
    assert words[words.index("--allow") + 1] == "device"
    assert words[words.index("--shm-size") + 1] == str(1 << 30)
    assert b"--device=nvidia.com/gpu=all" in Path(words[words.index("--file") + 1]).read_bytes()
    assert "--allow" not in builder.command(Stage("tuner", {}))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (["ERROR: failed to solve: dockerfile parse error on line 2: unknown flag: device"], "frontend"),
        (["ERROR: failed to solve: device entitlement is not allowed"], "does not grant devices"),
        (['ERROR: failed to solve: process "/bin/sh -c …" did not complete successfully: exit code: 1'], "saw no GPU"),
        (["#5 ERROR: no such device"], "no such device"),
        ([], "no reason"),
    ],
)
def test_why_a_builder_gives_no_device_is_said(said: list[str], reason: str) -> None:
    assert reason in devicerun.reason(said)


def test_a_builder_is_asked_only_when_it_may_know_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr("pipeline.image.devicerun.run", lambda words, **_more: asked.append(words))

    def why(version: tuple[int, int, int], *, cdi: bool = True) -> str:
        monkeypatch.setattr("pipeline.daemon.buildx.version", lambda: version)
        return devicerun.why_not({}, base="b", devices=("nvidia.com/gpu=all",), cdi=cdi, logfile=tmp_path / "log")

    assert "0.22" in why((0, 13, 1))
    assert "no CDI device" in why((0, 29, 0), cdi=False)
    assert asked == []
    assert why((0, 29, 0)) == ""
    assert asked[0][: len(asked[0]) - 1] == ["docker", "buildx", "build", "--progress=plain", "--output=type=cacheonly", "--allow", "device"]  # fmt: skip
    text = devicerun.probe_dockerfile("b", ("nvidia.com/gpu=all",))
    assert text.startswith("FROM b\nRUN --device=nvidia.com/gpu=all --network=none ")
    assert text != devicerun.probe_dockerfile("b", ("nvidia.com/gpu=all",)), "an earlier answer would be cached"


def prepared(access: str, runtime: str = "runc") -> Any:
    class Prepared:
        plan = type("Plan", (), {"device": "cuda"})
        gpus = Gpus(access)  # type: ignore[arg-type]
        engine = type("Engine", (), {"default_runtime": runtime})
        base = type("Base", (), {"reference": "b"})
        builder = Builder({}, b"", Path(), Path(), Path("log"))

    return Prepared


def test_the_way_is_chosen_from_what_the_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.image import choose

    answer = ""
    monkeypatch.setattr(choose, "why_not", lambda *_words, **_more: answer)
    request: Any = type("Request", (), {"tune_in": ""})
    assert choose.choose(request, prepared("cdi")).form == "device stage"
    assert choose.choose(request, prepared("default-runtime")).form == "classic stage"
    answer = "buildx is 0.13.1"
    way = choose.choose(request, prepared("cdi"))
    assert way.form == "container"
    assert "buildx is 0.13.1" in way.reason
    request.tune_in = "stage"
    with pytest.raises(choose.StageWithoutGpu, match=r"buildx is 0\.13\.1") as caught:
        choose.choose(request, prepared("cdi"))
    assert "TUNE_IN=container" in caught.value.hint
    assert "which is runc here" in caught.value.details[0]
    with pytest.raises(choose.StageWithoutGpu) as caught:
        choose.choose(request, prepared("runtime", runtime="nvidia"))
    assert "leave GPUS= out" in caught.value.details[0]
    request.tune_in = "container"
    assert choose.choose(request, prepared("default-runtime")).form == "container"


def test_libraries_that_differ_are_named_by_path() -> None:
    from pipeline.image.halves import Half
    from pipeline.image.libraries import differing

    one = Half({"cublas_version": "13.1.1"}, {"libcublas.so.13": "/opt/venv/a"}, {"libcublas.so.13": "1 bytes"})
    two = Half({"cublas_version": "13.2.0"}, {"libcublas.so.13": "/usr/lib/a"}, {"libcublas.so.13": "2 bytes"})
    assert differing(one, one) == []
    assert differing(one, two) == [
        "cublas_version: tuned with 13.1.1, the image has 13.2.0",
        "libcublas.so.13: tuned with /opt/venv/a, the image has /usr/lib/a",
        "libcublas.so.13: tuned with 1 bytes, the image has 2 bytes",
    ]


def test_caches_to_bake_say_what_they_were_tuned_on(tmp_path: Path) -> None:
    from argparse import Namespace

    from pipeline.image.arguments import _plan_for_caches

    def told(*arches: str, device: str = "") -> tuple[str, str]:
        root = tmp_path / "-".join(arches)
        for arch in arches:
            (root / "0.6.16" / arch / ("a" * 64)).mkdir(parents=True, exist_ok=True)
        asked = Namespace(cache=(root,), device=device, arch="")
        _plan_for_caches(asked)
        return asked.device, asked.arch

    assert told("90a") == ("cuda", "90a")
    assert told("cpu-x86_64") == ("cpu", "")
    assert told("100a", "90a", "cpu-x86_64") == ("cuda", "100a")
    assert told("90a", device="cpu") == ("cpu", "")


@pytest.mark.parametrize("way", ["stage", "container"])
def test_a_tuning_that_outlives_its_bound_is_a_failed_tuning(way: str, tmp_path: Path) -> None:
    from pipeline.contract.exits import Exit
    from pipeline.image.contain import ContainerTooSlow
    from pipeline.image.tuning import TuningTooSlow, tune

    class Slow:
        def fill(self, _place: Path) -> None:
            if way == "container":
                raise ContainerTooSlow("tuning did not end within 1 s", details=("last words",))
            run(["sh", "-c", "echo last words; exec sleep 600"], timeout=3.0)  # a shell has spoken by then

    with pytest.raises(TuningTooSlow, match="the tuning outlived its bound") as caught:
        tune(Slow(), None, tmp_path, tmp_path / "log", {})  # type: ignore[arg-type]
    assert (caught.value.exit_code, caught.value.details) == (Exit.WARM_UP, ("last words",))
    assert "--tune-max-wait" in caught.value.hint
