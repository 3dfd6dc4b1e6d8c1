"""Installing Debian's packages of the engine, as root, without starting any service.

Debian 12's own docker.io (20.10) is too old for named build contexts, so there Debian 13's comes through a source
of its own. That suite has priority 100 (never chosen by itself), the four packages below 500: nothing else of
the host moves, not even libc. The mirror is the one in the host's own sources.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline import log
from pipeline.contract.files import write_whole
from pipeline.run import ProcessFailed, run

from . import apt
from .errors import InstallFailed
from .facts import OLDEST
from .osrelease import System

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NEWER_KEY = Path("/usr/share/keyrings/debian-archive-trixie-stable.gpg")  # in the same package as KEYRING
NEWER = "trixie"
PINNED = ("docker.io", "docker-cli", "docker-buildx", "containerd")
# What dockerd calls but Debian only recommends, or what a bare container image of Debian lacks.
HELPERS = ("iptables", "iproute2", "ca-certificates")
DEBIAN = (*PINNED, *HELPERS)
UBUNTU = ("docker.io", "docker-buildx", *HELPERS)  # docker.io carries the CLI there; untested
OWN = "tuned-image-pipeline"
POLICY = Path("/usr/sbin/policy-rc.d")
_DENIED = 101  # what policy-rc.d answers to forbid an action
_OLDEST_DEBIAN = 12
_TIMEOUT = 900.0


def supported(system: System) -> bool:
    """Whether `install` knows this system."""
    if system.id == "debian":
        return system.major is None or system.major >= _OLDEST_DEBIAN
    return system.id == "ubuntu"


def names(system: System) -> tuple[str, ...]:
    """The packages of the engine on this system."""
    return UBUNTU if system.id == "ubuntu" else DEBIAN


def client_names(system: System) -> tuple[str, ...]:
    """The packages of buildx, with the CLI where none is there (a CLI that somebody put there stays)."""
    cli = () if shutil.which("docker") else (("docker.io",) if system.id == "ubuntu" else ("docker-cli",))
    return (*cli, "docker-buildx")


def program(name: str) -> str | None:
    """The path of a program, also in /usr/sbin, which is not on everyone's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def missing(system: System) -> bool:
    """Whether anything that the private engine needs is not there, on Debian 12 also whether dockerd is too old."""
    if any(program(name) is None for name in ("dockerd", "containerd", "runc", "docker", "ip", "iptables")):
        return True
    if system.id != "debian" or system.major != _OLDEST_DEBIAN:
        return False
    said = run([program("dockerd") or "dockerd", "--version"], capture=True, timeout=60).stdout
    found = re.search(r"version (\d+)\.", said)
    return found is None or int(found[1]) < OLDEST


def search_path() -> dict[str, str]:
    """PATH with the places of system programs added."""
    return {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def source_text(host: tuple[apt.Source, ...], codename: str) -> str:
    """The deb822 source for the newer suite; raise `InstallFailed` when the host names no mirror of its own suite."""
    main = apt.mirrors(host, codename)
    if not main:
        raise InstallFailed(
            f"apt's sources name no mirror for {codename} main",
            hint=f"add Debian's {codename} source to /etc/apt/sources.list.d, then `pipeline engine up`",
        )
    security = apt.mirrors(host, f"{codename}-security")
    stanzas = [(main, f"{NEWER} {NEWER}-updates"), *([(security, f"{NEWER}-security")] if security else [])]
    return "\n".join(
        f"Types: deb\nURIs: {' '.join(uris)}\nSuites: {suites}\nComponents: main\nSigned-By: {KEYRING}\n"
        for uris, suites in stanzas
    )


def pin_text(*, whole_suite: bool) -> str:
    """The preferences: the engine's packages may come from the newer suite and, where we added it, nothing else."""
    keep_away = f"Package: *\nPin: release n={NEWER}*\nPin-Priority: 100\n\n" if whole_suite else ""
    return f"{keep_away}Package: {' '.join(PINNED)}\nPin: release n={NEWER}*\nPin-Priority: 500\n"


def add_newer_suite(root: Path, codename: str) -> None:
    """Write the pin and the source below `root` (/etc/apt), each whole; never the source without the pin.

    Where the host has a source of that suite already, it serves, and its own priorities stay: apt refuses the same
    source twice with different keyrings.
    """
    own = root / "sources.list.d" / f"{OWN}.sources"
    ours = apt.parse_deb822(own.read_text(encoding="utf-8")) if own.is_file() else ()
    others = tuple(s for s in apt.host_sources(root) if s not in ours)
    there = bool(apt.mirrors(others, NEWER))
    text = "" if there else source_text(others, codename)
    write_whole(root / "preferences.d" / OWN, pin_text(whole_suite=not there).encode())
    if text:
        write_whole(own, text.encode())
    else:
        own.unlink(missing_ok=True)


def _forbids(policy: Path) -> bool:
    """Whether an existing policy-rc.d already forbids starting docker."""
    return os.access(policy, os.X_OK) and (
        run([str(policy), "docker", "start"], accept=range(256), timeout=30).status == _DENIED
    )


@contextmanager
def no_service_starts(policy: Path) -> Iterator[None]:
    """Keep package scripts from starting docker or containerd while inside.

    Debian's hook for this is policy-rc.d. An existing one that allows is moved aside and asked for every
    other service; should we be killed in between, what stays behind forbids no other service and the next
    run puts the old one back.
    """
    aside = policy.with_name(f"{policy.name}.{OWN}")
    if aside.exists():
        aside.replace(policy)
    if policy.exists() and _forbids(policy) and OWN not in policy.read_text(errors="replace"):
        yield
        return
    if policy.exists() and OWN not in policy.read_text(errors="replace"):
        policy.replace(aside)
    text = (
        f"#!/bin/sh\n# written by {OWN} while it installs a Docker Engine\n"
        f'case "$1" in docker*|containerd*) exit {_DENIED} ;; esac\n'
        f'[ ! -x {aside} ] || exec {aside} "$@"\nexit 0\n'
    )
    write_whole(policy, text.encode(), mode=0o755)
    try:
        yield
    finally:
        if aside.exists():
            aside.replace(policy)
        else:
            policy.unlink(missing_ok=True)


def _apt_get(words: list[str], log_file: Path) -> None:
    env = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    run(["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words], env=env, log=log_file, timeout=_TIMEOUT)


def install(system: System, packages: tuple[str, ...], log_file: Path) -> None:
    """Install `packages` (of this system, see `names`); raise `InstallFailed` with apt's last lines."""
    if system.id == "ubuntu":
        log.warn("installing on Ubuntu is untested")
    # A dockerd that is there already is somebody's service: whether it starts at boot is theirs to say.
    new = program("dockerd") is None and "docker.io" in packages
    with log.step(f"installing {', '.join(packages)} with apt (log: {log_file})"):
        try:
            if system.id == "debian" and system.major == _OLDEST_DEBIAN:
                _prepare_newer_suite(system, log_file)
            _update(log_file)
            with no_service_starts(POLICY):
                _apt_get(["install", "-y", "--no-install-recommends", *packages], log_file)
        except ProcessFailed as error:
            raise InstallFailed(
                f"apt could not install the engine: {error.message}",
                hint=f"apt-get update && apt-get install {' '.join(packages)}",
                details=error.details,
                log=str(log_file),
            ) from error
        if new:
            _disable_services(log_file)


def _update(log_file: Path) -> None:
    # A broken source of somebody else must not stop us: whether our packages are there shows in the next step.
    with contextlib.suppress(ProcessFailed):
        _apt_get(["update"], log_file)


def _prepare_newer_suite(system: System, log_file: Path) -> None:
    codename = system.codename or "bookworm"
    if not (KEYRING.is_file() and NEWER_KEY.is_file()):  # Debian 12 before 12.11 does not know the newer suite's key
        _update(log_file)
        _apt_get(["install", "-y", "debian-archive-keyring"], log_file)
    add_newer_suite(apt.APT, codename)


def _disable_services(log_file: Path) -> None:
    """Keep the services that came along from starting at the next boot; the private engine needs none of them."""
    commands = (
        ["systemctl", "disable", "docker.service", "docker.socket", "containerd.service"],
        ["update-rc.d", "docker", "disable"],
    )
    for command in commands:
        path = program(command[0])
        if path is not None:  # without a running init this moves links only; where it fails, nothing was enabled
            run([path, *command[1:]], log=log_file, accept=range(256), timeout=60)
