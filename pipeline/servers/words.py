"""What a deployment says to its server: arguments and environment, secrets apart.

A server's hashes hold the spelling of its arguments, so they are kept word by word. Values of secret options and
variables are used for the start and baked nowhere.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipeline.contract.errors import UsageError

SERVERS = ("vllm", "sglang")
HIDDEN = "***"
BETWEEN = "--"  # stands between several sets of arguments
_SECRET_VARIABLE = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SECRET_OPTION = re.compile(r"--([a-z0-9]+[-_])*(key|token|secret|password)", re.IGNORECASE)
_SHORTEST = 4  # characters of a secret that can be recognized in a file
_SIZES = (
    ("tensor-parallel-size", "tp-size", "tp"),
    ("pipeline-parallel-size", "pp-size", "pp"),
    ("data-parallel-size", "dp-size", "dp"),
)
_MOST_RANKS = 1024
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ON = ("1", "true", "yes", "on")  # as huggingface_hub reads HF_HUB_OFFLINE
_PATH = re.compile(r"(/[\w.+@ -]+)+/?")


@dataclass(frozen=True)
class Words:
    """One deployment's words. `environment` becomes static ENV of the image; `secrets` are for the start alone."""

    server: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """Every option with its value (`true` for one without), the last one where it is repeated; others by place."""
        found: dict[str, str] = {}
        at, place = 0, 0
        while at < len(self.arguments):
            name, value = option(self.arguments[at])
            at += 1
            if not name:
                place += 1
                found[f"argument {place}"] = self.arguments[at - 1]
            elif value is not None:
                found[name] = value
            elif at < len(self.arguments) and not option(self.arguments[at])[0]:
                found[name] = self.arguments[at]
                at += 1
            else:
                found[name] = "true"
        return found

    @property
    def model(self) -> str:
        """The model as the arguments name it: a path, or a hub id."""
        first = self.arguments[0] if self.arguments else ""
        if self.server == "vllm" and first and not first.startswith("-"):
            return first
        found = self.options
        return found.get("model-path") or found.get("model") or found.get("model-tag") or ""

    @property
    def tp(self) -> int:
        """How many tensor parallel ranks there are. Raises `UsageError`."""
        return self._size(_SIZES[0])

    @property
    def ranks(self) -> int:
        """How many processes share the model. Raises `UsageError`."""
        sizes = [self._size(names) for names in _SIZES]
        if self.server == "sglang" and "enable-dp-attention" in self.options:
            del sizes[-1]  # it divides the tensor parallel ranks there, and adds none
        return math.prod(sizes)

    def _size(self, names: Sequence[str]) -> int:
        size = next((self.options[name] for name in names if name in self.options), "1")
        if not re.fullmatch(r"[0-9]{1,5}", size) or not 1 <= int(size) <= _MOST_RANKS:
            raise UsageError(f"--{names[0]} {size!r} is no number of ranks", hint=f"1 to {_MOST_RANKS}")
        return int(size)

    def recorded(self) -> tuple[str, ...]:
        """The arguments as they may be written down."""
        return self._shown()[0]

    def secret_values(self) -> tuple[str, ...]:
        """The values that must appear nowhere, as far as they are long enough to be recognized."""
        found = {*self.secrets.values(), *self._shown()[1]}
        return tuple(sorted(value for value in found if len(value) >= _SHORTEST))

    def _shown(self) -> tuple[tuple[str, ...], list[str]]:
        """The arguments without values of secrets, and these values."""
        shown: list[str] = []
        secrets: list[str] = []
        hide = False
        for word in self.arguments:
            name, equals, value = word.partition("=")
            if hide:
                shown.append(HIDDEN)
                secrets.append(word)
                hide = False
            elif _SECRET_OPTION.fullmatch(name):
                shown.append(f"{name}={HIDDEN}" if equals else word)
                secrets += [value] if equals else []
                hide = not equals
            else:
                shown.append(word)
        return tuple(shown), secrets


def parse(server: str, arguments: str, environment: str) -> tuple[Words, ...]:
    """SERVER, SERVER_ARGS and SERVER_ENV as words, one for each set of arguments. Raises `UsageError`."""
    server = server.strip().lower()
    if server not in SERVERS:
        raise UsageError(f"there is no server {server!r}", hint=f"SERVER={'|'.join(SERVERS)}")
    given = variables(environment)
    secrets = {name: value for name, value in given.items() if _SECRET_VARIABLE.search(name)}
    kept = {name: value for name, value in given.items() if name not in secrets}
    found = tuple(Words(server, one, kept, secrets) for one in _sets(arguments) or [()])
    for one in found:
        _check(one)
    return found


def _sets(arguments: str) -> list[tuple[str, ...]]:
    words = split(arguments, "SERVER_ARGS")
    return [tuple(part) for between, part in groupby(words, BETWEEN.__eq__) if not between]


def with_tp(server: str, arguments: str, tp: int) -> str:
    """SERVER_ARGS with the server's own option for TP= in every set. Raises `UsageError` where one says otherwise."""
    sets = [Words(server, one) for one in _sets(arguments)]
    for one in sets:
        if one.tp != tp and not one.options.keys().isdisjoint(_SIZES[0]):
            raise UsageError(f"TP={tp}, and SERVER_ARGS ask for {one.tp}", hint="leave TP= out")
    more = ("--tp-size" if server == "sglang" else "--tensor-parallel-size", str(tp))
    return f" {BETWEEN} ".join(shlex.join(one.arguments if one.tp == tp else (*one.arguments, *more)) for one in sets)


def _check(words: Words) -> None:
    example = "--model /mnt/models --max-model-len 8192"
    if words.server == "sglang":
        example = "--model-path /mnt/models --tp-size 2"
    hint = f"SERVER_ARGS='{example}': the arguments of its serve command, spelled as in production"
    if not words.model:
        raise UsageError("SERVER_ARGS name no model", hint=hint)
    if not _PATH.fullmatch(words.model) and not _HUB_ID.fullmatch(words.model):
        raise UsageError(f"{words.model!r} is neither an absolute path nor a hub id", hint=hint)
    if not words.model.startswith("/") and words.environment.get("HF_HUB_OFFLINE", "").lower() not in ON:
        raise UsageError(
            f"{words.model} is a hub id, and the start has no network",
            hint="SERVER_ENV='HF_HUB_OFFLINE=1', as in production: an online server's hash names a hub model otherwise",
        )
    if ".." in words.model.split("/"):
        raise UsageError(f"{words.model!r} has `..` in it", hint=hint)
    if "config" in words.options:
        raise UsageError("SERVER_ARGS name a --config file, which is not here", hint="spell its options out")
    _ = words.ranks  # raises


def split(text: str, what: str) -> list[str]:
    """Split as a shell does. Raises `UsageError`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{what} cannot be parsed as shell arguments: {error}", hint="quote as in a shell") from error


def variables(text: str) -> dict[str, str]:
    """`N=V M=W` as a mapping. A secret's name alone, such as HF_TOKEN, stands for its value in this process's
    environment: so it is on no command line. Raises `UsageError`.
    """
    found = {}
    for word in split(text, "SERVER_ENV"):
        name, equals, value = word.partition("=")
        if not equals and _SECRET_VARIABLE.search(name):
            if name not in os.environ:
                raise UsageError(f"SERVER_ENV: {name} is not set in the environment", hint=f"export {name}=…")
            found[name] = os.environ[name]
            continue
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"SERVER_ENV: {word!r} is not NAME=VALUE", hint="SERVER_ENV='VLLM_X=1 HF_TOKEN'")
        found[name] = value
    return found


def option(word: str) -> tuple[str, str | None]:
    """`--Max_Len=3` as (`max-len`, `3`); an empty name where the word is no option."""
    if not word.startswith("-") or not word.lstrip("-") or re.fullmatch(r"-\d.*", word):
        return "", None
    name, equals, value = word.partition("=")
    return name.lstrip("-").replace("_", "-"), value if equals else None


def without(arguments: Sequence[str], dropped: Mapping[str, int]) -> list[str]:
    """The arguments without some options; `dropped` says how many values each has."""
    kept: list[str] = []
    skip = 0
    for word in arguments:
        name, value = option(word)
        if skip:
            skip -= 1
        elif word.startswith("--") and name in dropped:
            skip = 0 if value is not None else dropped[name]
        else:
            kept.append(word)
    return kept
