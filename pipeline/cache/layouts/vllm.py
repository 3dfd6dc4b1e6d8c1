"""vLLM: two file layouts and FlashInfer's managed store, told apart by the names of the files.

    <root>/<hash>/autotune_configs.json                       0.28: one file, read by the leader and broadcast; every
                                                              rank rewrites it at each start, the leader saves it last
    <root>/<hash>/autotune_configs_dp{d}_rank{r}.json         0.33, more than one rank: read only when every rank has
                                                              one with equal record and entry count
    <root>/v2/<16 digits>/{manifest.json, entries/*.json}     0.33, one rank: FlashInfer's managed store

`<root>` is `$VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR`, else
`$VLLM_CACHE_ROOT/flashinfer_autotune_cache/<flashinfer-version>/<arch>` (the managed store has another default). The
hash is vLLM's own: of its configuration, and in 0.28 of almost every `VLLM_*` variable too. It lacks the GPU's name, so
that a cache is offered from a key of ours, which has it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.cache.engine_variables import VLLM as VARIABLE
from pipeline.cache.engine_variables import enters_028

from . import managed
from .group import Group, Offer, RankFile, files_below, read_group, same_answers, same_records, whole_ranks

NAME = "vllm"
SHARED = "autotune_configs.json"
_RANK = re.compile(r"autotune_configs_dp(\d{1,6})_rank(\d{1,6})\.json")
_HASH = re.compile(r"[0-9a-f]{64}")


def root_directory(environment: Mapping[str, str], cache_root: str, flashinfer_version: str, arch: str) -> Path:
    """Where vLLM looks: the override has neither version nor arch in its path. `cache_root` is `$VLLM_CACHE_ROOT`."""
    override = environment.get(VARIABLE)
    if override:
        return Path(override).expanduser()
    return Path(cache_root) / "flashinfer_autotune_cache" / flashinfer_version / arch


def shared_file(root: Path, digest: str) -> Path:
    """0.28's file."""
    return root / digest / SHARED


def rank_file(root: Path, digest: str, dp: int, rank: int) -> Path:
    """0.33's file of one rank; `rank` counts within the world group of its data parallel rank."""
    return root / digest / f"autotune_configs_dp{dp}_rank{rank}.json"


def digest_028(factors: Sequence[str]) -> str:
    """The last step of 0.28's hash, over vLLM's own factors (environment, configuration, compiler where used)."""
    return hashlib.sha256(str(list(factors)).encode()).hexdigest()


def digest_033(config_hash: str) -> str:
    """The last step of 0.33's hash, over vLLM's hash of its configuration without its version."""
    return hashlib.sha256(config_hash.encode()).hexdigest()


def hash_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that enter 0.28's hash as far as they are set; recorded when tuned, compared at start.

    0.33 hashes no variable of its own here. What `vllm serve` is told and the path of the model enter both.
    """
    return {name: value for name, value in sorted(environment.items()) if enters_028(name)}


def gather(root: str) -> tuple[Group, ...]:
    """All groups below a root of vLLM's: each `<hash>` directory, each store, however deep the root lies."""
    place = Path(root)
    groups: dict[Path, list[RankFile]] = {}
    for path in files_below(place, lambda name: name == SHARED or bool(_RANK.fullmatch(name))):
        match = _RANK.fullmatch(path.name)
        where = (("dp", int(match[1])), ("rank", int(match[2]))) if match else ()
        groups.setdefault(path.parent, []).append(RankFile(path, where))
    found = [_group(place, folder, files) for folder, files in groups.items()]
    for manifest in files_below(place, lambda name: name == "manifest.json"):
        folder = manifest.parent
        if folder.parent.name == "v2" and (folder / "entries").is_dir():
            entries = files_below(folder / "entries", lambda name: name.endswith(".json"))
            files = tuple(RankFile(path) for path in (manifest, *entries))
            found.append(Group(NAME, place, str(folder.relative_to(place)), files, {"kind": "store"}))
    return tuple(sorted(found, key=lambda group: group.directory))


def _group(root: Path, folder: Path, files: list[RankFile]) -> Group:
    kind = "ranks" if all(one.place for one in files) else "shared"
    parts = {"kind": kind, "digest": folder.name}
    return Group(NAME, root, str(folder.relative_to(root)), tuple(sorted(files, key=lambda f: f.place)), parts)


def check(group: Group) -> tuple[str, ...]:
    """vLLM's rule for using a group, and ours for trusting it."""
    if group.parts["kind"] == "store":
        return tuple(managed.check(group))
    said: list[str] = []
    if not _HASH.fullmatch(group.parts["digest"]):
        said.append(f"{group.directory} is not named by a hash of vLLM's")
    files, wrong = read_group(group)
    said += wrong
    if group.parts["kind"] == "shared":
        if len(group.files) > 1:
            said.append(f"{group.directory} holds both a shared file and files of single ranks")
        return tuple(said)
    said += whole_ranks(group) + same_records(files)
    # With pipeline stages only the ranks of one stage tune together: `team` is how many, all of them by default.
    team = int(group.parts.get("team", "0")) or max(len(files), 1)
    for start in range(0, len(files), team):
        said += same_answers(files[start : start + team])
    # vLLM counts top-level keys beside the record: namespaced records and the generation count too.
    counts = {one.path.name: len(file.entries) + len(file.extras) for one, file in files}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        said.append(f"the ranks hold different numbers of entries, and vLLM then uses none: {listed}")
    return tuple(said)


def offer(group: Group) -> Offer:
    """Below the override lies the hash at once. The baked copy stays as it is: vLLM writes."""
    directory = group.directory if group.parts["kind"] == "store" else group.parts["digest"]
    if group.parts["kind"] == "store":
        directory = "/".join(Path(group.directory).parts[-2:])
    return Offer(VARIABLE, directory, "new tactics" if group.parts["kind"] == "ranks" else "the whole file, each start")
