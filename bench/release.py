"""A finished release of 20 cells run again, and what a re-tuned image sends to the registry.

Needs an engine with the containerd store, Debian's docker-registry and cosign. The set-up bakes images of one tuned
cache whose manifests differ, and takes their replay for granted: what is measured, the run that finds everything
released, asks the registry alone. Two of them hold caches of more entries, which are synthetic.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench.measure import many, once, say
from pipeline.commands import release as command
from pipeline.contract.digest import sha256_bytes
from pipeline.contract.key import make_key
from pipeline.contract.manifest import Covered, FileFacts, Manifest
from pipeline.contract.places import CACHE_FILE, MANIFEST_FILE
from pipeline.daemon import up
from pipeline.home import cache_home
from pipeline.image import verify

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "release"), str(ROOT / "tests" / "unit")]

CELLS = 20
LARGE = (168, 10_080)  # entries of the synthetic caches
TUNE = [
    sys.executable, "-m", "pipeline", "tune", "tiny", "--tp", "1", "--ops", "o", "--buckets", "1,8", "--judge", "off",
]  # fmt: skip


def _caches(root: Path, place: Path, count: int) -> list[Path]:
    """Copies of a cache root whose manifests differ in a remark; the keys stay the same."""
    made = []
    for number in range(count):
        copy = place / f"cache-{number}"
        shutil.copytree(root, copy)
        path = next(copy.rglob(MANIFEST_FILE))
        manifest = _manifest(path)
        changed = dataclasses.replace(manifest, notes=(*manifest.notes, f"cell {number} of a benchmark"))
        _write(path, changed)
        made.append(copy)
    return made


def _large(root: Path, place: Path, count: int) -> Path:
    """A cache of `count` entries: those of an H200's file, their token counts moved where that has too few. The plan
    has an op for each 14 of them. Times are of a seeded generator, since times compress badly.
    """
    path = next(root.rglob(MANIFEST_FILE))
    manifest, own = _manifest(path), json.loads((path.parent / CACHE_FILE).read_text(encoding="utf-8"))
    real = json.loads((ROOT / "tests" / "cases" / "caches" / "h200_two_tunes_a.json").read_text(encoding="utf-8"))
    del real["_metadata"]
    moved = {key.replace("((", f"(({n}", 1): real[key] for n in range(1, count // len(real) + 1) for key in real}
    buckets = tuple(1 << power for power in range(14))
    ops = [dataclasses.replace(manifest.plan.ops[0], name=f"op{at}", buckets=buckets) for at in range(count // 14)]
    plan = dataclasses.replace(manifest.plan, ops=tuple(ops))
    random_ = random.Random(count)  # noqa: S311 - no secret
    rows = []
    for at, (key, (runner, tactic)) in enumerate(moved.items()):
        times = random_.uniform(0.01, 3), random_.uniform(0.8, 1), random_.uniform(0, 0.02)
        chosen, ratio, spread = (round(time, digits) for time, digits in zip(times, (6, 4, 4), strict=True))
        row = Covered(f"op{at // 14}", buckets[at % 14], key, runner, tactic, random_.randrange(3, 60))
        default = round(chosen / ratio, 6)
        rows.append(
            dataclasses.replace(
                row, time_ms=chosen, default_ms=default, ratio=ratio, spread=spread, decided_by="faster"
            )
        )
    data = json.dumps({"_metadata": own["_metadata"], **moved}, indent=2).encode()
    made = dataclasses.replace(
        manifest,
        key=str(make_key(plan.digest, manifest.record)),
        plan=plan,
        covered=tuple(rows),
        files={CACHE_FILE: FileFacts(len(data), sha256_bytes(data))},
        ranks=tuple(dataclasses.replace(rank, entries=len(moved)) for rank in manifest.ranks),
    )
    folder = place / f"large-{count}" / made.key
    folder.mkdir(parents=True)
    (folder / CACHE_FILE).write_bytes(data)
    _write(folder / MANIFEST_FILE, made)
    return place / f"large-{count}"


def _manifest(path: Path) -> Manifest:
    return Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))


def _write(path: Path, manifest: Manifest) -> None:
    path.write_text(json.dumps(manifest.to_json(), indent=2) + "\n", encoding="utf-8")


def _matrix(place: Path, caches: list[Path]) -> Path:
    path = place / "release.toml"
    words = '[[cells]]\nmodel = "tiny"\ntp = 1\ndevice = "cpu"\n'
    cells = [f'{words}name = "c{at}"\ncache = "{one}"\n' for at, one in enumerate(caches)]
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
        caches = [*_caches(root, place, CELLS - len(LARGE)), *(_large(root, place, count) for count in LARGE)]
        os.environ["COSIGN_PASSWORD"] = "of a benchmark"  # noqa: S105
        subprocess.run(["cosign", "generate-key-pair"], cwd=place, check=True, capture_output=True)
        signed = ["--sign", str(place / "cosign.key")]
        with running(place / "registry") as registry, Proxy(registry.host) as proxy:
            words = ["--registry", proxy.host, "--matrix", str(_matrix(place, caches))]
            for cell in (caches[0], caches[1], *caches[-len(LARGE) :]):
                _matrix(place, [cell])
                proxy.seen.clear()
                _run(words)
                if cell is not caches[0]:
                    _told(proxy.seen, cell)
            proxy.seen.clear()
            _run([*words, *signed])
            say("bytes received for the signatures of an image, its verdict and its SBOM", _received(proxy.seen))
            _matrix(place, caches)
            _run(words)
            again = [sys.executable, "-m", "pipeline", "release", "run", *words]
            say(f"`pipeline release run`, {CELLS} cells released already (goal: under 5 s)", many(again, runs=5))
            proxy.seen.clear()
            _run(words)
            writes = sum(one.method in ("PUT", "POST", "PATCH") for one in proxy.seen)
            say("  requests to the registry, and writes among them", f"{len(proxy.seen)}, {writes}")
            _run([*words, *signed])
            say("  the same, signed", many([*again, *signed], runs=5))
            journals = cache_home() / "releases"
            journals.rename(place / "journals")
            wall, processors, _ = once([*again, *signed])
            say(
                "  the same, signed, on a host that released none of it", f"{wall:.3f} s, processors {processors:.3f} s"
            )
            shutil.rmtree(journals)
            (place / "journals").rename(journals)


def _received(seen: list[Any]) -> int:
    return sum(one.size for one in seen if one.method in ("PUT", "POST", "PATCH"))


def _told(seen: list[Any], cache: Path) -> None:
    """What was received for an image that differs from one there in its cache alone."""
    key = next(cache.rglob(MANIFEST_FILE)).parent
    packed = sum(len(gzip.compress(path.read_bytes(), mtime=0)) for path in key.iterdir())
    entries = len(json.loads((key / CACHE_FILE).read_bytes())) - 1
    everything = _received(seen)
    blobs = sorted((one.size for one in seen if "/blobs/uploads/" in one.path and one.size), reverse=True)
    say(f"a re-tuned image whose cache has {entries:,} entries: its files, each compressed", packed)
    say("  bytes received", f"{everything} ({everything - sum(blobs)} of manifests)")
    say("  the largest blobs", ", ".join(map(str, blobs[:8])))
    say("  over the compressed cache's bytes (goal: at most 2)", f"{everything / packed:.2f}")


def _run(words: list[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.configure_run(parser)
    with _replays_taken_for_granted():
        code = command.execute_run(parser.parse_args(words))
    if code:
        sys.exit(f"the set-up ended with {code}")
