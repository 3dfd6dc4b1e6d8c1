"""Small sound caches to break: a plan of one op over three buckets, tuned by two ranks on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.manifest import Covered, FileFacts, Manifest, RankFacts
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.contract.record import Host, Key, Record, make_key

CPU = {
    "flashinfer_version": "0.6.16.post3",
    "cuda_version": "unknown",
    "cublas_version": "unknown",
    "cudnn_version": "unknown",
    "cudnn_frontend_version": "unknown",
    "gpu": "unknown",
}
H200 = {
    "flashinfer_version": "0.6.16.post3",
    "cuda_version": "13.0",
    "cublas_version": "13.1.0",
    "cudnn_version": "91900",
    "cudnn_frontend_version": "1.32.0",
    "gpu": "NVIDIA H200",
}


def entry_key(bucket: int, op: str = "cpu_gemm", runner: str = "TiledRunner") -> str:
    return str((op, runner, ((bucket, 64), (64, 128)), ("float32",)))


def plan(arch: str = "cpu-x86_64", buckets: tuple[int, ...] = (1, 8, 64), tp: int = 2) -> Plan:
    op = OpPlan("qkv", "cpu_gemm", {"n": 128, "k": 64}, {"a": "float32", "b": "float32"}, buckets)
    device = "cpu" if arch.startswith("cpu") else "cuda"
    return Plan("tiny", device, arch, "0.6.16.post3", Layout(tp=tp), (op,))


def record(gpu: str = "") -> Record:
    if gpu:
        return Record({**H200, "gpu": gpu}, "90a", Host((gpu, gpu), "580.95"))
    return Record(CPU, "cpu-x86_64", Host((), "", {"model": "A CPU", "flags": "0" * 64, "threads": "1"}))


def manifest(gpu: str = "", tactic: int = 3, **change) -> tuple[Manifest, bytes]:
    """A manifest and the cache file that it describes."""
    rec, what = change.get("record") or record(gpu), plan("90a" if gpu else "cpu-x86_64")
    entries = {entry_key(b): ["TiledRunner", tactic] for b in what.ops[0].buckets}
    data = (json.dumps({"_metadata": dict(rec.flashinfer), **entries}, indent=2) + "\n").encode()
    made = Manifest(
        key=str(make_key(what.digest, rec)),
        plan=what,
        record=rec,
        strategy="argmin",
        strategy_reason="a sample",
        ranks=tuple(RankFacts(r, "host", "cpu", gpu, "", len(entries), 1.0) for r in range(2)),
        owners={},
        covered=tuple(
            Covered("qkv", b, entry_key(b), "TiledRunner", tactic, 4, 0, 0.5, 0.6) for b in what.ops[0].buckets
        ),
        files={CACHE_FILE: FileFacts(len(data), sha256_bytes(data))},
        started="2026-01-01T00:00:00Z",
        ended="2026-01-01T00:00:09Z",
    )
    return replace(made, **change), data


def write(root: Path, gpu: str = "", tactic: int = 3, **change) -> Path:
    """Write a key below a root and return its directory."""
    made, data = manifest(gpu, tactic, **change)
    path = root / str(Key.parse(make_key(made.plan.digest, made.record).__str__()))
    path.mkdir(parents=True)
    (path / CACHE_FILE).write_bytes(data)
    (path / MANIFEST_FILE).write_text(json.dumps(made.to_json()))
    return path
