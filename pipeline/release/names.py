"""Tags: made from a template whose fields are known only in part before the image is."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.contract.errors import UsageError
from pipeline.image.naming import plain

# field -> what it may look like while its value is not known yet
FIELDS: Mapping[str, str] = {
    "model": r"[a-z0-9.-]+",
    "tp": r"[0-9]+",
    "gpu": r"[a-z0-9.-]+",
    "engine": r"[a-z0-9.-]+",
    "flashinfer": r"[a-z0-9.-]+",
    "key": r"[0-9a-f]{8}",
    "cache": r"[0-9a-f]{8}",
}
DEFAULT = "{model}-tp{tp}-{gpu}-fi{flashinfer}-{key}"
DEFAULT_WITH_ENGINE = "{model}-tp{tp}-{gpu}-{engine}-fi{flashinfer}-{key}"
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # the grammar of the OCI distribution specification
_PARTS = 44  # characters of a model's or a GPU's name, so that the default stays within the 128 of a tag


class TemplateInvalid(UsageError):
    """A template of tags has a field that does not exist, or can give no tag."""


@dataclass(frozen=True)
class Names:
    """The fields of one cell. What is not known yet is empty text."""

    model: str
    tp: int
    flashinfer: str
    gpu: str = ""
    engine: str = ""
    key: str = ""
    cache: str = ""

    def fields(self) -> dict[str, str]:
        """Every field in the characters that a tag may have."""
        return {
            "model": plain(self.model, _PARTS),
            "tp": str(self.tp),
            "gpu": plain(self.gpu, _PARTS) if self.gpu else "",
            "engine": plain(self.engine, _PARTS) if self.engine else "",
            "flashinfer": plain(self.flashinfer),
            "key": self.key[:8],
            "cache": self.cache[:8],
        }


def _fields(template: str) -> list[str]:
    """The fields that a template uses; raise `TemplateInvalid` on one that is none."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise TemplateInvalid(f"{template!r} is no template: {error}", hint=f"such as {DEFAULT}") from None
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if name not in FIELDS or spec or conversion:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            raise TemplateInvalid(
                f"{template!r}: there is no field {{{name}}}" + (f"; did you mean {{{near[0]}}}?" if near else ""),
                hint=f"fields: {', '.join('{' + field + '}' for field in FIELDS)}",
            )
    return [name for _, name, _, _ in parts if name]


def check_template(template: str) -> list[str]:
    """The fields that a template uses; raise `TemplateInvalid` when it can give no tag."""
    used = _fields(template)
    example = expand(template, Names("m", 1, "1.0", "g", "e", "0" * 8, "0" * 8))
    if not TAG.fullmatch(example):
        raise TemplateInvalid(
            f"{template!r} gives no tag: {example!r}", hint="letters, digits, `_`, `.` and `-`, at most 128"
        )
    return used


def check_names(template: str, names: Names) -> None:
    """Raise `TemplateInvalid` when a template gives no tag for what is known of a cell, whatever the rest will be."""
    tag = expand(template, replace(names, gpu=names.gpu or "g", key=names.key or "0" * 8, cache=names.cache or "0" * 8))
    if not TAG.fullmatch(tag):
        raise TemplateInvalid(
            f"{template!r} gives no tag for {names.model}: {tag!r}",
            hint="is a field empty for it ({engine} without an engine), or is it longer than 128 characters?",
        )


def expand(template: str, names: Names) -> str:
    """The tag."""
    return template.format_map(names.fields())


def pattern(template: str, names: Names) -> re.Pattern[str]:
    """What the tag looks like while some fields are not known."""
    known = names.fields()
    made = ""
    for text, name, _, _ in string.Formatter().parse(template):
        made += re.escape(text)
        if name is not None:
            made += re.escape(known[name]) if known[name] else FIELDS[name]
    return re.compile(made)
