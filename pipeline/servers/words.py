"""What a deployment says to its server: arguments and environment, secrets apart.

A server's hashes hold the spelling of its arguments, so they are kept word by word. Values of secret options and
variables are used for the start and written nowhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.contract.errors import UsageError

SERVERS = ("vllm", "sglang")
HIDDEN = "***"
_SECRET_VARIABLE = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SECRET_OPTION = re.compile(r"--([a-z0-9]+[-_])*(key|token|secret|password)", re.IGNORECASE)
_SIZES = (
    ("tensor-parallel-size", "tp-size", "tp"),
    ("pipeline-parallel-size", "pp-size", "pp"),
    ("data-parallel-size", "dp-size", "dp"),
)
_MOST_RANKS = 1024
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATH = re.compile(r"(/[\w.+@ -]+)+/?")


@dataclass(frozen=True)
class Words:
    """One deployment's words. `environment` becomes static ENV of the image; `secrets` are for the start alone."""

    server: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The model as the server is told of it: a path, or a hub id."""
        named = values(self.arguments, "model-path", "model", "model-tag")
        first = self.arguments[0] if self.arguments else ""
        positional = first if self.server == "vllm" and first and not first.startswith("-") else ""
        return positional or (named[-1] if named else "")

    @property
    def tp(self) -> int:
        """How many tensor parallel ranks there are."""
        return _size(self.arguments, _SIZES[0])

    @property
    def ranks(self) -> int:
        """How many processes share the model."""
        world = 1
        for names in _SIZES:
            if self.server == "sglang" and "dp" in names and flag(self.arguments, "enable-dp-attention"):
                continue  # it divides the tensor parallel ranks there, and adds none
            world *= _size(self.arguments, names)
        return world

    def secret_values(self) -> tuple[str, ...]:
        """The values that must appear nowhere, as far as they are long enough to be recognized."""
        found = [*self.secrets.values()]
        for at, word in enumerate(self.arguments):
            name, equals, value = word.partition("=")
            if _SECRET_OPTION.fullmatch(name):
                found += [value] if equals else self.arguments[at + 1 : at + 2]
        return tuple(sorted({value for value in found if len(value) >= 4}))

    def recorded(self) -> tuple[str, ...]:
        """The arguments as they may be written down."""
        shown: list[str] = []
        hide = False
        for word in self.arguments:
            name, equals, _ = word.partition("=")
            secret = bool(_SECRET_OPTION.fullmatch(name))
            shown.append(HIDDEN if hide else f"{name}={HIDDEN}" if secret and equals else word)
            hide = secret and not equals
        return tuple(shown)


def parse(server: str, arguments: str, environment: str) -> Words:
    """SERVER, SERVER_ARGS and SERVER_ENV as words. Raises `UsageError`."""
    server = server.strip().lower()
    if server not in SERVERS:
        raise UsageError(f"there is no server {server!r}", hint=f"SERVER={'|'.join(SERVERS)}")
    found = variables(environment)
    secrets = {name: value for name, value in found.items() if _SECRET_VARIABLE.search(name)}
    kept = {name: value for name, value in found.items() if name not in secrets}
    words = Words(server, tuple(split(arguments, "SERVER_ARGS")), kept, secrets)
    _check(words)
    return words


def _check(words: Words) -> None:
    example = "--model /mnt/models --max-model-len 8192"
    if words.server == "sglang":
        example = "--model-path /mnt/models --tp-size 2"
    hint = f"SERVER_ARGS='{example}': the arguments of its serve command, spelled as in production"
    if not words.model:
        raise UsageError("SERVER_ARGS name no model", hint=hint)
    if not _PATH.fullmatch(words.model) and not _HUB_ID.fullmatch(words.model):
        raise UsageError(f"{words.model!r} is neither an absolute path nor a hub id", hint=hint)
    if ".." in words.model.split("/"):
        raise UsageError(f"{words.model!r} holds `..`", hint=hint)
    if values(words.arguments, "config"):
        raise UsageError("SERVER_ARGS name a --config file, which is not here", hint="spell its options out")
    for names in _SIZES:
        _size(words.arguments, names)


def split(text: str, what: str) -> list[str]:
    """Split as a shell does. Raises `UsageError`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{what} cannot be split into words: {error}", hint="quote as in a shell") from error


def variables(text: str) -> dict[str, str]:
    """`N=V M=W` as a mapping. Raises `UsageError`."""
    found = {}
    for word in split(text, "SERVER_ENV"):
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"SERVER_ENV: {word!r} is not NAME=VALUE", hint="SERVER_ENV='VLLM_X=1 Y=2'")
        found[name] = value
    return found


def option(word: str) -> tuple[str, str | None]:
    """`--Max_Len=3` as (`max-len`, `3`); an empty name where the word is no option."""
    if not word.startswith("-") or not word.lstrip("-") or re.fullmatch(r"-\d.*", word):
        return "", None
    name, equals, value = word.partition("=")
    return name.lstrip("-").replace("_", "-"), value if equals else None


def values(arguments: Sequence[str], *names: str) -> list[str]:
    """The values of an option, however it is spelled."""
    found = []
    for at, word in enumerate(arguments):
        name, value = option(word)
        if name in names:
            found.append("".join(arguments[at + 1 : at + 2]) if value is None else value)
    return found


def flag(arguments: Sequence[str], name: str) -> bool:
    """Whether an option without a value is there."""
    return any(option(word)[0] == name for word in arguments)


def without(arguments: Sequence[str], dropped: Mapping[str, int]) -> list[str]:
    """The arguments without some options; `dropped` says how many values each has."""
    kept: list[str] = []
    skip = 0
    for word in arguments:
        if skip:
            skip -= 1
            continue
        name, value = option(word)
        if word.startswith("--") and name in dropped:
            skip = 0 if value is not None else dropped[name]
        else:
            kept.append(word)
    return kept


def options(arguments: Sequence[str]) -> dict[str, str]:
    """Every option with its value (`true` for one without), the last one where it is repeated; other words by place."""
    found: dict[str, str] = {}
    at, place = 0, 0
    while at < len(arguments):
        name, value = option(arguments[at])
        at += 1
        if not name:
            found[f"argument {place + 1}"] = arguments[at - 1]
            place += 1
        elif value is not None:
            found[name] = value
        elif at < len(arguments) and not option(arguments[at])[0]:
            found[name] = arguments[at]
            at += 1
        else:
            found[name] = "true"
    return found


def _size(arguments: Sequence[str], names: Sequence[str]) -> int:
    found = values(arguments, *names)
    if not found:
        return 1
    if not re.fullmatch(r"[0-9]{1,5}", found[-1]) or not 1 <= int(found[-1]) <= _MOST_RANKS:
        raise UsageError(f"--{names[0]} {found[-1]!r} is no number of ranks", hint=f"1 to {_MOST_RANKS}")
    return int(found[-1])
