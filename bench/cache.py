"""explain of 10,000 entries, the entry point's overhead, and the bytes of a cache layer against its content."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bench.measure import many, say
from pipeline.cache.oci import write_layout

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


def main() -> None:
    """Measure; needs no engine and no GPU."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        path = ten_thousand(place)
        size = path.stat().st_size
        words = [sys.executable, "-m", "pipeline", "explain", str(path), "--env", str(place / "record.json")]
        say(f"explain of {60 * 168:,} entries ({size / 1e6:.1f} MB), without torch", many(words))
        bare = many([sys.executable, "-IS", "-c", "pass"], runs=20)
        nothing = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(place / "none")}
        start = many([sys.executable, "-IS", str(ENTRY), "true"], runs=20, env=nothing)
        say("an interpreter that does nothing", bare)
        say("pipeline-run true, no cache baked, interpreter included", start)
        root = place / "root" / "0.6.16.post3" / "90a" / ("0" * 64)
        root.mkdir(parents=True)
        (root / path.name).write_bytes((CASES / "h200_two_tunes_a.json").read_bytes())
        written = write_layout(place / "root", place / "oci", tag="x", architecture="amd64", labels={})
        layer = (place / "oci" / "blobs" / "sha256" / written.layer.partition(":")[2]).stat().st_size
        content = (root / path.name).stat().st_size
        say("bytes of the layer against its content, 168 entries", f"{layer:,} against {content:,}")
