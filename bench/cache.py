"""explain of 10,000 entries, the entry point's overhead, and the bytes of a cache layer against its content."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bench.measure import many, say
from pipeline.cache.oci import write_layout
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.files import write_json, write_whole
from pipeline.contract.key import make_key
from pipeline.contract.manifest import Covered, FileFacts, Manifest, RankFacts
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.contract.plan import Layout, OpPlan, Plan
from pipeline.contract.record import Host, Record

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "cases" / "caches"
ENTRY = ROOT / "pipeline" / "start" / "pipeline-run"


def ten_thousand(place: Path) -> Path:
    """A cache file of more than 10,000 entries, made of a real one whose token counts are moved."""
    real = json.loads((CASES / "h200_two_tunes_a.json").read_text())
    entries = {key: value for key, value in real.items() if key != "_metadata"}
    moved = {key.replace("((", f"(({n}", 1): value for n in range(1, 61) for key, value in entries.items()}
    path = place / "autotune_configs.json"
    path.write_text(json.dumps({"_metadata": real["_metadata"], **moved}, indent=2))
    (place / "record.json").write_text(json.dumps(real["_metadata"]))
    return path


def baked(root: Path, number: int) -> None:
    """A key as the tuner writes it, with a manifest of 168 rows, tuned on another processor each."""
    real = (CASES / "h200_two_tunes_a.json").read_bytes()
    entries = [(key, value) for key, value in json.loads(real).items() if key != "_metadata"]
    record = Record(json.loads(real)["_metadata"], "cpu-x86_64", Host(cpu={"model": f"processor {number}"}))
    op = OpPlan("x", "cpu_mm", {"n": 8, "k": 8}, {"a": "float32"}, (1,))
    plan = Plan("x", "cpu", "cpu-x86_64", "0.6.16.post3", Layout(tp=2), (op,))
    made = Manifest(
        key=str(make_key(plan.digest, record)),
        plan=plan,
        record=record,
        strategy="synchronized",
        strategy_reason="a sample",
        ranks=tuple(RankFacts(rank, "host", "cpu", "", "", len(entries), 1.0) for rank in range(2)),
        owners={},
        covered=tuple(Covered("x", at, key, runner, tactic, 9) for at, (key, (runner, tactic)) in enumerate(entries)),
        files={CACHE_FILE: FileFacts(len(real), sha256_bytes(real))},
        started="2026-01-01T00:00:00Z",
        ended="2026-01-01T00:00:00Z",
    )
    write_whole(root / made.key / CACHE_FILE, real)
    write_json(root / made.key / MANIFEST_FILE, made.to_json())


def main() -> None:
    """Measure; needs no engine and no GPU."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        path = ten_thousand(place)
        size = path.stat().st_size
        words = [sys.executable, "-m", "pipeline", "explain", str(path), "--env", str(place / "record.json")]
        say(f"explain of {60 * 168:,} entries ({size / 1e6:.1f} MB), without torch", many(words))
        bare = many([sys.executable, "-IS", "-c", "pass"], runs=20)
        say("an interpreter that does nothing", bare)
        for name, roots in (("no cache baked", 0), ("one key of 168 entries", 1), ("four keys", 4)):
            for number in range(roots):
                baked(place / f"keys-{roots}", number)
            here = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(place / f"keys-{roots}")}
            start = many([sys.executable, "-IS", str(ENTRY), "true"], runs=20, env=here)
            say(f"pipeline-run true, {name}, interpreter included", start)
        root = place / "root" / "0.6.16.post3" / "90a" / ("0" * 64)
        root.mkdir(parents=True)
        (root / path.name).write_bytes((CASES / "h200_two_tunes_a.json").read_bytes())
        written = write_layout(place / "root", place / "oci", tag="x", architecture="amd64", labels={})
        layer = (place / "oci" / "blobs" / "sha256" / written.layer.partition(":")[2]).stat().st_size
        content = (root / path.name).stat().st_size
        say("bytes of the layer against its content, 168 entries", f"{layer:,} against {content:,}")
