"""Install Debian packages for this tool, as root, without starting a service, and remove them again.

    /var/lib/tuned-image-pipeline/packages      what was installed here that was not there before, one name a line
    /var/lib/tuned-image-pipeline/lock          one apt of this tool at a time (`.ci/python-venv` takes it too)
    /etc/apt/sources.list.d/, preferences.d/tuned-image-pipeline*      Debian 12 only

Debian 12's own docker.io (20.10) is too old for named build contexts, so Debian 13's comes from the host's mirror. That
suite has priority 100 (never chosen by itself), the engine's packages 500: nothing else of the host moves.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline import log
from pipeline.contract.errors import DockerError
from pipeline.contract.files import write_whole
from pipeline.run import ProcessFailed, run

from .lock import locked

STATE = Path("/var/lib/tuned-image-pipeline")
APT = Path("/etc/apt")
POLICY = Path("/usr/sbin/policy-rc.d")
NAME = "tuned-image-pipeline"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NEWER_KEY = Path("/usr/share/keyrings/debian-archive-trixie-stable.gpg")  # in the same package as KEYRING
NEWER = "trixie"
ENGINE = ("docker.io", "docker-cli", "docker-buildx", "containerd")
_TIMEOUT = 900.0  # s; a slow line


def supported() -> bool:
    """Whether packages can be installed here: Debian 12 or newer, or Ubuntu (not tried)."""
    system = _system()
    version = system.get("VERSION_ID", "").split(".")[0]
    debian = system.get("ID") == "debian" and (not version.isdecimal() or int(version) >= 12)
    return (debian or system.get("ID") == "ubuntu") and program("apt-get") is not None


def _system() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _debian_12() -> bool:
    system = _system()
    return system.get("ID") == "debian" and system.get("VERSION_ID") == "12"


def program(name: str) -> str | None:
    """The path of a program, also in /usr/sbin, which is not on every user's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def install_engine(log_file: Path, oldest: int) -> None:
    """Install dockerd, containerd, the CLI and buildx where one is missing, or dockerd is older than `oldest`."""
    needed = {"dockerd", "containerd", "runc", "docker"}
    if any(program(name) is None for name in needed) or _dockerd_version() < oldest:
        ubuntu = _system().get("ID") == "ubuntu"  # docker.io contains the CLI there
        names = ("docker.io", "docker-buildx") if ubuntu else ENGINE
        install([*names, "ca-certificates"], log_file, newer_suite=True)


def install_buildx(log_file: Path) -> None:
    """Install buildx, and the CLI where there is none; a CLI that somebody put there stays."""
    cli = [] if shutil.which("docker") else ["docker.io" if _system().get("ID") == "ubuntu" else "docker-cli"]
    install([*cli, "docker-buildx"], log_file, newer_suite=True)


def _dockerd_version() -> int:
    said = run([program("dockerd") or "dockerd", "--version"], capture=True, timeout=60).stdout
    found = re.search(r"version (\d+)\.", said)
    return int(found[1]) if found else 0


def install(packages: Iterable[str], log_file: Path, *, newer_suite: bool = False) -> None:
    """Install packages, record which of them and of their dependencies are new, and print how to undo it.

    `newer_suite` makes Debian 13 known on Debian 12. Two processes take turns. Raises `DockerError` with apt's last
    lines. The caller is root, and `supported()`.
    """
    names = list(packages)
    with locked(STATE / "lock", "apt"), log.step(f"install {', '.join(names)} with apt (log: {log_file})"):
        try:
            if newer_suite and _debian_12():
                _add_newer_suite(log_file)
            _update(log_file)
            new = _changes("Inst", ["install", *names])
            with _no_service_starts():
                _record(new)  # before they are there: a kill in between must not hide them
                _apt(["install", "-y", "--no-install-recommends", *names], log_file)
        except ProcessFailed as error:
            raise DockerError(
                f"apt could not install {', '.join(names)}: {error.message}",
                hint=f"as root: apt-get update && apt-get install {' '.join(names)}",
                details=error.details,
                log=str(log_file),
            ) from error
        if "docker.io" in new:
            _disable_services(log_file)
    if new:
        log.note(f"{len(new)} packages are new on this machine; `pipeline daemon remove` removes them again")


def remove(log_file: Path) -> tuple[str, ...]:
    """Remove the packages that `install` added, and Debian 13's source and pin; return the packages.

    Raises `DockerError` when a package that was installed otherwise needs one of them; then nothing is removed.
    """
    with locked(STATE / "lock", "apt"):
        names = recorded()
        if names:
            others = _changes("Remv", ["remove", *names]) - set(names)
            if others:
                raise DockerError(
                    f"other packages need what was installed here: {', '.join(sorted(others))}",
                    hint=f"remove them first, or keep everything and delete {STATE}",
                )
            try:
                _apt(["remove", "-y", *names], log_file)
            except ProcessFailed as error:
                raise DockerError(
                    f"apt could not remove {', '.join(names)}", details=error.details, log=str(log_file)
                ) from error
        for file in (_source(), _pin(), STATE / "packages"):
            file.unlink(missing_ok=True)
    return names


def mirrors(suite: str) -> tuple[str, ...]:
    """The addresses from which this host's apt takes component `main` of a suite; empty where apt knows none."""
    if program("apt-get") is None:
        return ()
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Identifier: Packages"]
    rows = [line.split(" ", 2) for line in run(command, capture=True, timeout=60).stdout.splitlines()]
    return tuple(dict.fromkeys(row[2].rstrip("/") for row in rows if row[:2] == [suite, "main"]))


def _source() -> Path:
    return APT / "sources.list.d" / f"{NAME}.sources"


def _pin() -> Path:
    return APT / "preferences.d" / NAME


def _add_newer_suite(log_file: Path) -> None:
    """Write the pin and the source of Debian 13, the pin first; a source that the host has already is used as it is."""
    if mirrors(NEWER):
        write_whole(_pin(), _pin_text(whole_suite=_source().exists()).encode())
        return
    codename = _system().get("VERSION_CODENAME", "bookworm")
    main, security = mirrors(codename), mirrors(f"{codename}-security")
    if not main:
        raise DockerError(
            f"apt's sources name no mirror for {codename} main",
            hint=f"add Debian's {codename} source to /etc/apt/sources.list.d, then `pipeline daemon up`",
        )
    if not (KEYRING.is_file() and NEWER_KEY.is_file()):  # Debian 12 before 12.11 does not know the newer suite's key
        _update(log_file)
        _apt(["install", "-y", "debian-archive-keyring"], log_file)
    stanzas = [(main, f"{NEWER} {NEWER}-updates"), *([(security, f"{NEWER}-security")] if security else [])]
    text = "\n".join(
        f"Types: deb\nURIs: {' '.join(uris)}\nSuites: {suites}\nComponents: main\nSigned-By: {KEYRING}\n"
        for uris, suites in stanzas
    )
    write_whole(_pin(), _pin_text(whole_suite=True).encode())
    write_whole(_source(), text.encode())


def _pin_text(*, whole_suite: bool) -> str:
    keep_away = f"Package: *\nPin: release n={NEWER}*\nPin-Priority: 100\n\n" if whole_suite else ""
    return f"{keep_away}Package: {' '.join(ENGINE)}\nPin: release n={NEWER}*\nPin-Priority: 500\n"


def _apt(words: list[str], log_file: Path) -> None:
    env = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    run(["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words], env=env, log=log_file, timeout=_TIMEOUT)


def _update(log_file: Path) -> None:
    # A broken source of somebody else must not stop us: whether the packages are there shows in the next step.
    with contextlib.suppress(ProcessFailed):
        _apt(["update"], log_file)


def _changes(action: str, words: list[str]) -> set[str]:
    """The packages that apt would install anew (`Inst`) or remove (`Remv`)."""
    command = ["apt-get", "--simulate", "-o", "Debug::NoLocking=1", "--no-install-recommends", *words]
    said = run(command, capture=True, env={"LC_ALL": "C.UTF-8"}, timeout=_TIMEOUT).stdout
    # `Inst name [old version] (new version …)`: one with an old version is an upgrade.
    pattern = rf"^{action} (\S+) {'' if action == 'Remv' else r'[(]'}"
    return set(re.findall(pattern, said, re.MULTILINE))


def _installed() -> set[str]:
    if program("dpkg-query") is None:
        return set()
    said = run(["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n"], capture=True).stdout
    return {line.split()[0] for line in said.splitlines() if line.endswith(" installed")}


def recorded() -> tuple[str, ...]:
    """The packages that `remove` would remove."""
    return tuple(sorted(_recorded() & _installed()))


def _recorded() -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return set((STATE / "packages").read_text(encoding="utf-8").split())
    return set()


def _record(names: set[str]) -> None:
    write_whole(STATE / "packages", "".join(f"{name}\n" for name in sorted(_recorded() | names)).encode())


@contextmanager
def _no_service_starts() -> Iterator[None]:
    """Keep package scripts from starting docker or containerd: policy-rc.d is Debian's hook for that.

    A policy that is there already stays in charge. What a killed run leaves forbids no other service.
    """
    mark = f"# written by {NAME} while it installs packages"
    if POLICY.exists() and mark not in POLICY.read_text(errors="replace"):
        yield
        return
    write_whole(POLICY, f'#!/bin/sh\n{mark}\ncase "$1" in docker*|containerd*) exit 101 ;; esac\n'.encode(), mode=0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def _disable_services(log_file: Path) -> None:
    """Keep the services that came along from starting at the next boot; the private engine needs none of them."""
    for command in (
        ["systemctl", "disable", "docker.service", "docker.socket", "containerd.service"],
        ["update-rc.d", "docker", "disable"],
    ):
        path = program(command[0])
        if path is not None:  # without a running init this moves links only; where it fails, nothing was enabled
            run([path, *command[1:]], log=log_file, accept=range(256), timeout=60)
