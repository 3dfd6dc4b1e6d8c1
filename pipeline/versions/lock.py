"""Locks: requirements/NAME.in compiles to requirements/NAME.txt, every wheel with its hashes.

uv resolves: for another Python and another platform than this one's, and for all systems at once, which pip and
pip-tools cannot. It reads no pip.conf, so pip is asked for its configuration (`pip config list`), and uv is given that.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import UsageError
from pipeline.contract.text import without_login
from pipeline.run import ProcessFailed, run

from .findings import Finding
from .requirements import Pin, logical_lines, read_text
from .source import Lock, Versions, canonical

FOLDER = "requirements"
_CUDA = re.compile(r"(nvidia|cuda|nccl)[-0-9].*|triton|nccl-extensions|nccl4py")
_NOT_CUDA = {"nvidia-ml-py"}  # bindings to the driver's library by ctypes, no library itself
_TIMEOUT = 300.0  # seconds for one lock; it needs some


class CompileFailed(UsageError):
    """A lock cannot be compiled: the index is out of reach, or no set of versions satisfies the requirements."""


def source(name: str) -> str:
    """The path of what an environment asks for."""
    return f"{FOLDER}/{name}.in"


def target(name: str) -> str:
    """The path of an environment's lock."""
    return f"{FOLDER}/{name}.txt"


# ---- compile


@dataclass(frozen=True)
class PipConfig:
    """What pip is configured for, as words and environment of uv. `extra` are the indexes beside the main one."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    extra: tuple[str, ...]


def pip_config() -> PipConfig:
    """Ask pip itself; its files, its environment variables and their order are pip's business."""
    said = run([sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"], capture=True).stdout
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in said.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in sections:
            sections[section][option] = str(ast.literal_eval(value))
    options = {**sections["global"], **sections["install"], **sections[":env:"]}

    def several(option: str) -> list[str]:
        return options.get(option, "").split()

    words = ["--no-config", "--index-strategy", "unsafe-best-match"]  # as pip: the best of all indexes
    main, extra = options.get("index-url", ""), several("extra-index-url")
    if extra and not main:
        default = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
        main = run([sys.executable, "-c", default], capture=True).stdout.strip()
    if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        words.append("--no-index")
    elif main:  # uv prefers what it is given first, and locks the hashes of that index: the main one has all of them
        words += [word for index in (main, *extra) for word in ("--index", index)]
        words += ["--default-index", main]
    for option, word in (("find-links", "--find-links"), ("constraint", "--constraints"),
                         ("trusted-host", "--allow-insecure-host")):  # fmt: skip
        words += [part for value in several(option) for part in (word, value)]
    if options.get("keyring-provider") in ("subprocess", "import"):
        words += ["--keyring-provider", "subprocess"]
    names = (("cert", "SSL_CERT_FILE"), ("client-cert", "SSL_CLIENT_CERT"), ("proxy", "ALL_PROXY"),
             ("timeout", "UV_HTTP_TIMEOUT"), ("default-timeout", "UV_HTTP_TIMEOUT"),
             ("retries", "UV_HTTP_RETRIES"))  # fmt: skip
    environment = {variable: options[option] for option, variable in names if options.get(option)}
    environment["UV_PYTHON_DOWNLOADS"] = "never"  # nothing is built, so that the Python of a lock need not be here
    return PipConfig(tuple(words), environment, tuple(extra))


def compile_locks(
    versions: Versions, files: Mapping[str, bytes], names: Iterable[str], note: Callable[[str], None], *,
    upgrade: tuple[str, ...] = (),
) -> dict[str, bytes]:  # fmt: skip
    """Compile the locks `names` from `files` (.in files, and the locks of today); raise `CompileFailed`.

    What a lock of today pins stays where the requirements allow it, unless `upgrade` names it (`*`: everything). The
    result has the new locks by their path.
    """
    config = pip_config()
    done: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="pipeline-locks-") as work:
        folder = Path(work) / FOLDER
        folder.mkdir()
        for path, data in files.items():
            if path.startswith(f"{FOLDER}/") and "/" not in path.removeprefix(f"{FOLDER}/"):
                (folder.parent / path).write_bytes(data)
        compiler = _Compiler(folder, config, upgrade, note)
        for name in names:
            note(f"compile {target(name)}")
            text, unresolved = compiler.lock(name, versions.locks[name])
            done[target(name)] = _with_header(text, name, versions.locks[name], files, unresolved)
    return done


def _words(name: str, lock: Lock, machine: str = "x86_64") -> list[str]:
    """What stands in the lock's own header: enough to compile it by hand."""
    linux = f"--python-platform={machine}-manylinux_{lock.glibc}"
    system = linux if lock.system == "linux" else "--universal"
    return ["--generate-hashes", system, f"--python-version={lock.python}", f"--output-file={name}.txt", f"{name}.in"]


@dataclass(frozen=True)
class _Compiler:
    """uv, in a folder that has the .in files and the locks of today."""

    folder: Path
    config: PipConfig
    upgrade: tuple[str, ...]
    note: Callable[[str], None]

    def lock(self, name: str, lock: Lock) -> tuple[str, str]:
        """The text of a lock, and why it is for x86_64 alone, where an index has no wheel for aarch64."""
        place = self.folder / f"{name}.txt"
        before = place.read_bytes() if place.exists() else b""
        text = self._uv(name, lock, _words(name, lock))
        if lock.system != "linux":
            return text, ""
        place.write_bytes(before)
        try:
            other = self._uv(name, lock, _words(name, lock, "aarch64"))
        except CompileFailed as error:
            found = re.search(r"Because (\S+) has no wheels with a matching platform tag", " ".join(error.details))
            return text, (
                f"the indexes that were asked have no {found[1]} for aarch64" if found else "aarch64 was not resolved"
            )
        if differ := sorted(_pins(other) ^ _pins(text)):
            raise CompileFailed(
                f"{target(name)} would differ between x86_64 and aarch64: {', '.join(differ[:4])}",
                hint=f"pin these in templates/{source(name)}.j2",
            )
        return text, ""

    def _uv(self, name: str, lock: Lock, words: list[str]) -> str:
        words = [*words, *self.config.words, "--only-binary", ":all:", "--no-header", "--emit-index-annotation"]
        if lock.without:
            (self.folder / f"{name}.without").write_text("\n".join(lock.without) + "\n", encoding="utf-8")
            words += ["--excludes", f"{name}.without"]
        for package in self.upgrade:
            words += ["--upgrade"] if package == "*" else ["--upgrade-package", package]
        said: list[str] = []
        try:
            run(
                [sys.executable, "-m", "uv", "pip", "compile", *words],
                env=self.config.environment, cwd=self.folder, timeout=_TIMEOUT, capture=True, on_line=said.append,
            )  # fmt: skip
        except ProcessFailed as error:
            raise CompileFailed(
                f"{source(name)} cannot be compiled",
                details=[line.strip() for line in error.details if line.strip()][-12:],
                hint="uv was given pip's configuration: `pip config debug` shows it",
            ) from error
        for line in said:
            if "is yanked" in line:  # the template pins it, or nothing else fits
                self.note(line)
        rows = (self.folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        return "".join(f"{row}\n" for row in map(self._without_address, rows) if row)

    def _without_address(self, row: str) -> str:
        """A row of a lock; one that says where a wheel comes from says it without the address, or not at all."""
        found = re.match(r"    # from (.*)", row)
        if found is None:
            return row
        if not re.match(r"https?://", found[1]):
            return "    # from a folder on the disk of whoever compiled this: its hash was not compared with an index"
        extra = any(found[1].rstrip("/") == index.rstrip("/") for index in self.config.extra)
        return "    # from an extra index" if extra else ""


def _pins(text: str) -> set[str]:
    return {content.partition(" ")[0] for _, content in logical_lines(text)}


def _with_header(text: str, name: str, lock: Lock, files: Mapping[str, bytes], unresolved: str) -> bytes:
    head = [
        f"# Compiled from {source(name)} by `pipeline versions bump`; never edited by hand.",
        "# This file was autogenerated by uv via the following command:",
        f"#    uv pip compile {' '.join(_words(name, lock))}",
        *([f"# without what this environment does not need: {', '.join(lock.without)}"] if lock.without else []),
        *([f"# x86_64 alone: {unresolved}"] if unresolved else []),
        f"# requirements {_inputs_digest(name, lock, files)}",
        f"# pins {_pins_digest(text)}",
    ]
    return ("\n".join(head) + "\n\n" + text).encode()


# ---- check, offline


def _inputs_digest(name: str, lock: Lock, files: Mapping[str, bytes]) -> str:
    """Of what a lock is compiled from: the lines of its .in file and of those that it includes, and its settings."""
    asked: dict[str, list[str]] = {}
    todo = [source(name)]
    while todo:
        path = todo.pop()
        if path in files and path not in asked:
            text = files[path].decode()
            asked[path] = [content for _, content in logical_lines(text)]
            todo += [f"{FOLDER}/{one.value}" for one in read_text(text, path).includes if not one.limits]
    lines = sorted(line for found in asked.values() for line in found)
    return "sha256:" + sha256_json([lines, lock.model_dump()])


def _pins_digest(text: str) -> str:
    return "sha256:" + sha256_json([content for _, content in logical_lines(text)])


def outdated(versions: Versions, files: Mapping[str, bytes]) -> list[str]:
    """The environments whose lock is missing, or was compiled from other requirements than those of `files`."""
    names = []
    for name, lock in versions.locks.items():
        text = files.get(target(name), b"").decode("utf-8", "replace")
        if source(name) in files and f"# requirements {_inputs_digest(name, lock, files)}" not in text.splitlines():
            names.append(name)
    return names


def check_locks(versions: Versions, files: Mapping[str, bytes]) -> list[Finding]:
    """Hold every lock against its .in file and versions.json; `files` has both."""
    findings: list[Finding] = []
    read: dict[str, list[Pin]] = {}
    for name, lock in versions.locks.items():
        path = target(name)
        if source(name) not in files:
            findings.append(Finding(source(name), 0, f"is missing: {versions.file} has a lock {name}", "lock"))
        elif path not in files:
            findings.append(Finding(path, 0, "is missing; `pipeline versions bump --refresh` compiles it", "lock"))
        else:
            try:
                text = files[path].decode()
            except UnicodeDecodeError:
                findings.append(Finding(path, 0, "is not UTF-8", "lock"))
                continue
            parsed = read_text(text, path)
            read[name] = parsed.pins
            found = parsed.problems + [one for pin in parsed.pins for one in _check_pin(path, lock, pin)]
            findings += found or _check_digests(name, lock, files, text)
    return [*findings, *_check_constraints(files, read)]


def _check_digests(name: str, lock: Lock, files: Mapping[str, bytes], text: str) -> list[Finding]:
    lines, cure = text.splitlines(), "`pipeline versions bump --refresh`"
    if f"# requirements {_inputs_digest(name, lock, files)}" not in lines:
        message = f"was compiled from other requirements than {source(name)} has now: {cure}"
    elif f"# pins {_pins_digest(text)}" not in lines:
        message = f"was edited by hand: its pins are not those that were compiled (`git diff` shows which); {cure}"
    else:
        return []
    return [Finding(target(name), 1, message, "lock")]


def _check_pin(path: str, lock: Lock, pin: Pin) -> Iterator[Finding]:
    """A pin has a version and a hash; a CPU lock no CUDA package, and no torch but a CPU build; other locks no such."""

    def wrong(message: str) -> Finding:
        return Finding(path, pin.line, message, "lock")

    who = pin.name or without_login(pin.url)
    cpu_build = pin.version is not None and Version(pin.version).local == "cpu"
    if pin.version is None:
        yield wrong(f"{who}{pin.specifier} is no pin")
    if not any(re.fullmatch(r"sha256:[0-9a-f]{64}", found) for found in pin.hashes):
        yield wrong(f"{who} has no sha256 hash")
    if lock.cpu and pin.name and _CUDA.fullmatch(pin.name) and pin.name not in _NOT_CUDA:
        yield wrong(f"{pin.name} is for CUDA, and this lock is for CPUs")
    elif lock.cpu and pin.name == "torch" and not cpu_build:
        yield wrong(f"torch=={pin.version} is no CPU build (+cpu)")
    elif not lock.cpu and lock.system == "linux" and cpu_build:
        yield wrong(f"{pin.name}=={pin.version} is a CPU build, and this lock is not for CPUs")


def _check_constraints(files: Mapping[str, bytes], read: Mapping[str, list[Pin]]) -> Iterator[Finding]:
    """A lock that another limits (`-c host.txt`) pins what that one pins."""
    for name, pins in read.items():
        for include in read_text(files[source(name)].decode(), source(name)).includes:
            others = read.get(include.value.removesuffix(".txt"), []) if include.limits else []
            versions: dict[str | None, set[str | None]] = {}
            for other in others:
                versions.setdefault(other.name, set()).add(other.version)
            for pin in pins:
                theirs = versions.get(pin.name, {pin.version})
                if pin.version not in theirs:
                    said = f"{FOLDER}/{include.value} pins {', '.join(sorted(map(str, theirs)))}"
                    yield Finding(target(name), pin.line, f"{pin.name}=={pin.version}; {said}", "lock")


def pinned(data: bytes) -> dict[str, str]:
    """Canonical name -> version of a lock's pins, for whoever installs them."""
    found = read_text(data.decode(), "").pins
    return {canonical(pin.name): pin.version for pin in found if pin.name and pin.version}
