"""A finished release of 20 cells run again, and what a re-tuned image sends to the registry.

Needs an engine with the containerd store and Debian's docker-registry. The set-up bakes 20 images of one tuned cache
whose manifests differ, and takes their replay for granted: what is measured, the run that finds everything released,
asks the registry alone.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench.measure import many, say
from pipeline.commands import release as command
from pipeline.contract.manifest import Manifest
from pipeline.contract.places import MANIFEST_FILE
from pipeline.engine import up
from pipeline.image import verify

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "release"), str(ROOT / "tests" / "unit")]

CELLS = 20
TUNE = [
    sys.executable,
    "-m",
    "pipeline",
    "tune",
    "tiny",
    "--tp",
    "1",
    "--ops",
    "o",
    "--buckets",
    "1,8",
    "--judge",
    "off",
]


def _caches(root: Path, place: Path, count: int) -> list[Path]:
    """Copies of a cache root whose manifests differ in a remark; the keys stay the same."""
    made = []
    for number in range(count):
        copy = place / f"cache-{number}"
        shutil.copytree(root, copy)
        path = next(copy.rglob(MANIFEST_FILE))
        manifest = Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
        changed = dataclasses.replace(manifest, notes=(*manifest.notes, f"cell {number} of a benchmark"))
        path.write_text(json.dumps(changed.to_json(), indent=2) + "\n", encoding="utf-8")
        made.append(copy)
    return made


def _matrix(place: Path, caches: list[Path]) -> Path:
    path = place / "release.toml"
    cells = [f'[[cells]]\nmodel = "tiny"\ntp = 1\ndevice = "cpu"\ncache = "{one}"\n' for one in caches]
    path.write_text('tag = "{model}-tp{tp}-{key}-{cache}"\n' + "\n".join(cells), encoding="utf-8")
    return path


@contextmanager
def _replays_taken_for_granted() -> Iterator[None]:
    """Verify all but the replay."""

    def replay(_client: object, _image: str, _how: object, manifests: list[Manifest], _sheet: object) -> list[str]:
        return [manifest.key for manifest in manifests]

    with mock.patch.object(verify, "_replay_all", replay):
        yield


def main() -> None:
    """Measure."""
    from release_faults import Proxy
    from release_registries import running

    up("containerd")
    root = Path(subprocess.run(TUNE, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1])
    with tempfile.TemporaryDirectory(prefix="bench-release-") as temporary:
        place = Path(temporary)
        caches = _caches(root, place, CELLS)
        matrix = _matrix(place, caches)
        with running(place / "registry") as registry, Proxy(registry.host) as proxy:
            words = ["--registry", proxy.host, "--matrix", str(matrix)]
            for number, cells in ((1, caches[:1]), (2, caches[:2])):
                _matrix(place, cells)
                proxy.seen.clear()
                _run(words)
                if number == 2:
                    _told(proxy.seen, caches[1])
            _matrix(place, caches)
            _run(words)
            again = many([sys.executable, "-m", "pipeline", "release", *words], runs=5)
            say(f"`pipeline release`, {CELLS} cells released already (goal: under 5 s)", again)
            proxy.seen.clear()
            _run(words)
            writes = sum(one.method in ("PUT", "POST", "PATCH") for one in proxy.seen)
            say("  requests to the registry, and writes among them", f"{len(proxy.seen)}, {writes}")


def _told(seen: list[Any], cache: Path) -> None:
    """What was received for an image that differs from one there in its cache alone."""
    key = next(cache.rglob(MANIFEST_FILE)).parent
    packed = sum(len(gzip.compress(path.read_bytes(), mtime=0)) for path in key.iterdir())
    blobs = sorted((one.size for one in seen if "/blobs/uploads/" in one.path and one.size), reverse=True)
    manifests = [one.size for one in seen if "/manifests/" in one.path and one.size]
    everything = sum(blobs) + sum(manifests)
    say("bytes of the cache's files, each compressed", packed)
    say("bytes received for a re-tuned image", f"{everything} ({len(blobs)} blobs, {len(manifests)} manifests)")
    say("  the largest blobs", ", ".join(map(str, blobs[:8])))
    say("  over the compressed cache's bytes (goal: at most 2)", f"{everything / packed:.1f}")


def _run(words: list[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.configure(parser)
    with _replays_taken_for_granted():
        code = command.execute(parser.parse_args(words))
    if code:
        sys.exit(f"the set-up ended with {code}")
