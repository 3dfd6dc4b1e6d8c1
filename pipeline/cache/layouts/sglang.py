"""SGLang 0.5.23: one file per rank, all in a directory named by a short hash of what was served.

    $SGLANG_CACHE_DIR/flashinfer/autotune/<flashinfer-version>/sm<major><minor>/<16 digits>/
        rank_tp{t}_pp{p}_dp{d}.json            `_gpu<uuid>` before `.json` for the MegaMoE backend

The ranks of one tensor parallel group must hold equal files under equal records, or all of them delete their own and
tune again. Every start saves, so the directory must be writable.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.cache.engine_variables import SGLANG as VARIABLE

from .group import Group, Offer, RankFile, files_below, read_group, same_answers, same_records, whole_ranks

NAME = "sglang"
_RANK = re.compile(r"rank_tp(\d{1,6})_pp(\d{1,6})_dp(\d{1,6})(?:_gpu[^/]+)?\.json")


@dataclass(frozen=True)
class Served:
    """What SGLang's short hash covers, each part as `str()` spells it in SGLang."""

    model_path: str
    dtype: str
    quantization: str
    moe_backend: str
    tp: int
    pp: int
    attention_dp: int
    moe_ep: int
    config_class: str
    skip_ops: tuple[str, ...] = ()
    draft_quantization: str | None = None  # for a draft model's worker only

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        parts: list[str] = [self.model_path, self.dtype, self.quantization, self.moe_backend]
        parts += [str(size) for size in (self.tp, self.pp, self.attention_dp, self.moe_ep)]
        parts += [self.config_class, "candidate_selection=v2_default", f"skip_ops={','.join(sorted(self.skip_ops))}"]
        if self.draft_quantization is not None:
            parts.append(f"draft_quant={self.draft_quantization}")
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def rank_file(root: Path, flashinfer_version: str, sm: str, digest: str, place: tuple[int, int, int]) -> Path:
    """The file of one rank; `sm` is `sm90`, `place` its tensor, pipeline and data parallel rank."""
    tp, pp, dp = place
    folder = root / "flashinfer" / "autotune" / flashinfer_version / sm / digest
    return folder / f"rank_tp{tp}_pp{pp}_dp{dp}.json"


def gather(root: str) -> tuple[Group, ...]:
    """One group for each directory of ranks' files below `$SGLANG_CACHE_DIR` or anything inside it."""
    place = Path(root)
    groups: dict[Path, list[RankFile]] = {}
    for path in files_below(place, lambda name: bool(_RANK.fullmatch(name))):
        match = _RANK.fullmatch(path.name)
        assert match is not None
        where = tuple(zip(("pp", "dp", "tp"), map(int, match.group(2, 3, 1)), strict=True))
        groups.setdefault(path.parent, []).append(RankFile(path, where))
    found = (
        Group(NAME, place, str(folder.relative_to(place)), tuple(sorted(files, key=lambda f: f.place)), _parts(folder))
        for folder, files in groups.items()
    )
    return tuple(sorted(found, key=lambda group: group.directory))


def _parts(folder: Path) -> dict[str, str]:
    version, sm, digest = folder.parts[-3:] if len(folder.parts) >= 3 else ("", "", folder.name)
    return {"flashinfer_version": version, "sm": sm, "digest": digest}


def check(group: Group) -> tuple[str, ...]:
    """SGLang's rule for using a group, and ours for trusting it."""
    said: list[str] = []
    if not re.fullmatch(r"[0-9a-f]{16}", group.parts["digest"]):
        said.append(f"{group.directory} is not named by a hash of SGLang's")
    files, wrong = read_group(group)
    said += wrong + whole_ranks(_grid(group)) + same_records(files)
    for _, team in _teams(_grid(group).files):
        paths = {one.path for one in team}
        said += same_answers([pair for pair in files if pair[0].path in paths])
        spelled = {one.path.name: one.path.read_bytes() for one in team if one.path.is_file()}
        if len({_digest(data) for data in spelled.values()}) > 1:
            said.append(f"SGLang deletes them and tunes again, since they are not equal: {', '.join(spelled)}")
    return tuple(said)


def _grid(group: Group) -> Group:
    """The group without `dp` where that says nothing of its own: under data parallel attention each tensor parallel
    rank has one `dp`, and all of them tune together.
    """
    places = [dict(one.place) for one in group.files]
    ranks = {(place["pp"], place["tp"]) for place in places}
    if len(ranks) < len(places) or len({place["dp"] for place in places}) < 2:
        return group
    files = tuple(replace(one, place=tuple(part for part in one.place if part[0] != "dp")) for one in group.files)
    return replace(group, files=files)


def _teams(files: Iterable[RankFile]) -> list[tuple[object, list[RankFile]]]:
    """The ranks of each tensor parallel group: those that differ in `tp` alone."""
    teams: dict[object, list[RankFile]] = {}
    for one in files:
        teams.setdefault(tuple(part for part in one.place if part[0] != "tp"), []).append(one)
    return list(teams.items())


def _digest(data: bytes) -> str:
    """Equal values, however they are spelled: SGLang compares what it would load."""
    import json

    try:
        return json.dumps(json.loads(data), sort_keys=True)
    except (ValueError, RecursionError):
        return hashlib.sha256(data).hexdigest()


def offer(group: Group) -> Offer:
    """`SGLANG_CACHE_DIR` is the root of all that SGLang caches, so that a copy of the path below it is offered."""
    parts = group.parts
    directory = f"flashinfer/autotune/{parts['flashinfer_version']}/{parts['sm']}/{parts['digest']}"
    return Offer(VARIABLE, directory, "every rank's file, each start")
