"""What verify holds against a manifest without a replay: compiled modules, the image half; and what the host writes in."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from typing import Any

import cache_samples as samples
import pytest

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.manifest import Manifest, Module
from pipeline.contract.record import Record
from pipeline.image.replay import _module_findings, differing
from pipeline.tune.record import differences

H200 = "NVIDIA H200"
DATA = b"\x7fELF" + b"0" * 3_000_000
PLACE = "/opt/site/flashinfer/data/aot/gemm/gemm.so"
GEMM = Module("gemm", len(DATA), sha256_bytes(DATA), PLACE)


def tar(data: bytes, kind: bytes = tarfile.REGTYPE) -> list[bytes]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("gemm.so")
        info.size, info.type = len(data), kind
        archive.addfile(info, io.BytesIO(data))
    whole = out.getvalue()
    return [whole[at : at + 70_000] for at in range(0, len(whole), 70_000)]


class Engine:
    """As much of the SDK's client as a container that is looked into and never started needs."""

    def __init__(self, files: dict[str, list[bytes]]) -> None:
        self.files = files
        self.containers = self.api = self

    def create(self, *_: Any, **__: Any) -> Any:
        return self

    def remove_container(self, *_: Any, **__: Any) -> None:
        pass

    def get_archive(self, path: str) -> Any:
        from docker.errors import NotFound

        if path not in self.files:
            raise NotFound("no such file")
        return iter(self.files[path]), {}


def found(files: dict[str, list[bytes]], modules: tuple[Module, ...], baked: list[str]) -> list[str]:
    made = samples.manifest(H200, modules=modules)[0]
    return list(_module_findings(Engine(files), "image", [made, made], baked))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "modules", "baked", "said"),
    [
        ({PLACE: tar(DATA)}, (GEMM,), ["gemm"], []),
        ({}, (GEMM,), [], []),  # left out with BAKE_JIT=0, or FlashInfer's own
        ({}, (GEMM,), ["gemm"], [f"the module gemm is not at {PLACE}"]),
        ({PLACE: tar(DATA)}, (), ["gemm"], ["the module gemm is in the image, and in no manifest"]),
        ({PLACE: tar(DATA[:-1])}, (GEMM,), ["gemm"], ["has 3000003 bytes, the manifest says 3000004"]),
        ({PLACE: tar(DATA + b"0")}, (GEMM,), ["gemm"], ["has 3000005 bytes, the manifest says 3000004"]),
        ({PLACE: tar(DATA[:-1] + b"1")}, (GEMM,), ["gemm"], ["does not have the sha256"]),
        ({PLACE: tar(b"", tarfile.SYMTYPE)}, (GEMM,), ["gemm"], ["has 0 bytes"]),
    ],
)
def test_compiled_modules_are_held_against_the_manifest(
    files: dict[str, list[bytes]], modules: tuple[Module, ...], baked: list[str], said: list[str]
) -> None:
    answer = found(files, modules, baked)
    assert len(answer) == len(said)
    assert all(part in line for part, line in zip(said, answer, strict=True))


TUNED = {"libcublas.so.13": "/usr/local/cuda/lib64/libcublas.so.13", "libtorch.so": "/opt/torch/libtorch.so"}


def with_libraries(**versions: str) -> Manifest:
    record = samples.record(H200)
    record = replace(record, flashinfer={**record.flashinfer, **versions}, libraries=TUNED)
    return samples.manifest(H200, record=record)[0]


def test_another_image_half_is_named_with_the_libraries_that_the_loader_finds() -> None:
    here = dict(with_libraries().record.image_half())
    assert "gpu" not in here
    other = {**TUNED, "libcublas.so.13": "/usr/lib/libcublas.so.13", "libcudnn.so.9": "/usr/lib/libcudnn.so.9"}
    assert list(differing(with_libraries(), here, other)) == []  # another path with the same version is no difference
    assert list(differing(with_libraries(), {**here, "cublas_version": "13.2.0"}, other)) == [
        "cublas_version is 13.2.0 in this image, it was 13.1.0 when tuned",
        "the loader finds /usr/lib/libcublas.so.13 in this image, it found /usr/local/cuda/lib64/libcublas.so.13 when tuned",
        "the loader finds /usr/lib/libcudnn.so.9 in this image, and found no libcudnn.so.9 when tuned",
    ]


def test_what_only_a_gpu_tells_is_said_and_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    here = {**with_libraries().record.image_half(), "cudnn_version": "unknown"}
    assert list(differing(with_libraries(), here, TUNED)) == []
    assert "not compared without a GPU: cudnn_version" in capsys.readouterr().err


def test_a_replay_names_the_libraries_too() -> None:
    tuned = with_libraries().record
    moved = {**TUNED, "libcublas.so.13": "/x"}
    assert differences(tuned, replace(tuned, libraries=moved)) == []
    here = replace(tuned, flashinfer={**tuned.flashinfer, "cublas_version": "14"}, libraries=moved)
    assert [row["field"] for row in differences(tuned, here)] == [
        "flashinfer.cublas_version",
        "library libcublas.so.13",
    ]


def test_an_older_record_and_module_are_read_without_their_new_fields() -> None:
    made = samples.manifest(H200, modules=(GEMM,))[0].to_json()
    del made["record"]["libraries"], made["modules"][0]["path"]
    read = Manifest.from_json(json.loads(json.dumps(made)))
    assert read.record.libraries == {} and read.modules[0].path == ""
    assert Record.from_json(made["record"]).image_half() == samples.record(H200).image_half()
