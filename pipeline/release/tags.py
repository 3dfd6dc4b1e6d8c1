"""Tags, made from a template; the tag by which the result of the same inputs is found again; annotations of a released
image beside its labels, which may change without changing the image.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.contract.errors import UsageError
from pipeline.contract.text import closest
from pipeline.image.names import PREFIX, plain
from pipeline.registry.reference import is_tag
from pipeline.run import ProcessFailed, ProgramMissing, run

INPUTS = f"{PREFIX}.inputs"  # the inputs digest: the same one is not built or pushed again
GPU = f"{PREFIX}.gpu"  # as a tag shows it
_OCI = "org.opencontainers.image"

DEFAULT = "{model}-tp{tp}-{gpu}-fi{flashinfer}-{key}"
DEFAULT_WITH_SERVER = "{model}-tp{tp}-{gpu}-{server}-fi{flashinfer}-{key}"
FIELDS = ("model", "tp", "gpu", "server", "flashinfer", "key", "cache")
_LENGTH = 44  # characters of a model's or a GPU's name, so that the default stays within the 128 of a tag
_EXAMPLE = {"model": "m", "tp": "1", "gpu": "g", "server": "s", "flashinfer": "1.0", "key": "0" * 8, "cache": "0" * 8}


class TemplateInvalid(UsageError):
    """A template of tags has an unknown field, or does not produce a valid tag."""


@dataclass(frozen=True)
class Names:
    """The fields of one image's tag; `key` and `cache` are hexadecimal, of any length."""

    model: str
    tp: int
    flashinfer: str
    gpu: str
    key: str
    cache: str
    server: str = ""

    def fields(self) -> Mapping[str, str]:
        """Every field in the characters that a tag may have."""
        return {
            "model": plain(self.model, _LENGTH),
            "tp": str(self.tp),
            "gpu": plain(self.gpu, _LENGTH) if self.gpu else "",
            "server": plain(self.server, _LENGTH) if self.server else "",
            "flashinfer": plain(self.flashinfer),
            "key": self.key[:8],
            "cache": self.cache[:8],
        }


def inputs_tag(digest: str) -> str:
    """The tag that leads to the result of these inputs."""
    return f"inputs-{digest}"


def fields_of(template: str) -> tuple[str, ...]:
    """The fields that a template uses; raise `TemplateInvalid` when it does not produce a valid tag."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise TemplateInvalid(f"{template!r} is not a template: {error}", hint=f"such as {DEFAULT}") from None
    for _, name, spec, conversion in parts:
        if name in FIELDS and (spec or conversion):
            raise TemplateInvalid(f"{template!r}: {{{name}}} takes no format", hint=f"write {{{name}}} alone")
        if name is not None and name not in FIELDS:
            near = closest(name, FIELDS)
            raise TemplateInvalid(
                f"{template!r}: there is no field {{{name}}}" + (f"; did you mean {{{near}}}?" if near else ""),
                hint=f"fields: {', '.join('{' + field + '}' for field in FIELDS)}",
            )
    _checked(template, template.format_map(_EXAMPLE))
    return tuple(name for _, name, _, _ in parts if name)


def expand(template: str, names: Names) -> str:
    """The tag; raise `TemplateInvalid` where a field is empty or too long for it."""
    return _checked(template, template.format_map(names.fields()), f" for {names.model}")


def _checked(template: str, tag: str, whom: str = "") -> str:
    if not is_tag(tag):
        raise TemplateInvalid(
            f"{template!r} does not produce a valid tag{whom}: {tag!r}",
            hint="letters, digits, `_`, `.` and `-`, at most 128; is {server} empty, since the cell has none?",
        )
    if re.match(r"(?i)inputs-|sha256-", tag):
        raise TemplateInvalid(f"{template!r}: tags that begin with inputs- and sha256- have a meaning of their own")
    return tag


def revision_annotations(root: Path) -> dict[str, str]:
    """The checkout's commit (with `-dirty` where files differ from it) and its origin's address without a login."""
    commit = _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    source = public_address(_git(root, "remote", "get-url", "origin"))
    return {name: text for name, text in ((f"{_OCI}.revision", commit), (f"{_OCI}.source", source)) if text}


def public_address(remote: str) -> str:
    """The https address of a git remote, without user and password; empty for a path on this host."""
    match = re.fullmatch(r"(?:[^@/\s]+@)?([^:/\s]+\.[^:/\s]+):(?!//)(\S+)", remote)  # git@host:path
    if match:
        return f"https://{match[1]}/{match[2]}".removesuffix(".git")
    try:
        parts = urlsplit(remote)
    except ValueError:
        return ""
    if parts.scheme not in ("https", "http", "ssh", "git") or not parts.hostname:
        return ""
    return f"https://{parts.hostname}{parts.path}".removesuffix(".git")


def _git(root: Path, *words: str) -> str:
    try:
        return run(["git", "-C", str(root), *words], capture=True, timeout=30).stdout.strip()
    except (ProcessFailed, ProgramMissing):
        return ""
