"""What is installed in an image: Python distributions and Debian packages, asked in a container without network."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import PublishError

if TYPE_CHECKING:
    from docker import DockerClient

_MAX_WAIT = 300.0  # seconds
_STATUS = "/var/lib/dpkg/status"
_RELEASE = "/etc/os-release"

# Runs in the image, whose Python may be any: what importlib.metadata finds on its search path, and two files.
_LOOK = f"""
import importlib.metadata as m, json
def text(path):
    try: return open(path, encoding="utf-8", errors="replace").read()
    except OSError: return ""
found = []
for d in m.distributions():
    if d.metadata is None or not d.metadata["Name"]: continue
    get = d.metadata.get
    found.append(dict(name=get("Name"), version=d.version, licence=get("License-Expression") or "",
                      licence_name=(get("License") or "").split("\\n")[0][:100], summary=get("Summary") or ""))
print(json.dumps(dict(distributions=found, status=text("{_STATUS}"), release=text("{_RELEASE}"))))
"""


class ContentsUnread(PublishError):
    """What is installed in an image could not be read in a container of it."""


@dataclass(frozen=True, order=True)
class Package:
    """One package: `kind` is `python` or `debian`. `sha256` is its wheel's, hexadecimal, where we resolved that."""

    kind: str
    name: str
    version: str
    architecture: str = ""
    licence: str = ""  # an SPDX expression
    licence_name: str = ""  # what the package says where that is no expression
    summary: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Contents:
    """Packages sorted by kind, name and version; `release` holds os-release's fields."""

    packages: tuple[Package, ...]
    release: Mapping[str, str] = field(default_factory=dict)


def look(client: DockerClient, image: str, wheels: Path | None = None) -> Contents:
    """Read what is installed in `image`, which the engine has.

    `wheels` is the folder of wheelhouses: a distribution whose wheel lies there is given the wheel's sha256.
    Raises `ContentsUnread`, or `ContainerTooSlow`.
    """
    from pipeline.image.contain import Sandbox, run_to_end

    sandbox = Sandbox(user="65532:65532", read_only=True)
    ended = run_to_end(client, image, ["python3", "-c", _LOOK], sandbox, max_wait=_MAX_WAIT)
    try:
        told = json.loads(ended.stdout)
        packages = {*_distributions(told["distributions"], wheels), *debian(str(told["status"]))}
        return Contents(tuple(sorted(packages)), _fields(str(told["release"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ContentsUnread(
            f"python3 in {image} did not say what is installed", details=ended.stderr, hint="an SBOM needs that"
        ) from error


def debian(status: str) -> list[Package]:
    """The installed packages of dpkg's status file."""
    from email.parser import Parser

    found = []
    for stanza in status.split("\n\n"):
        fields = Parser().parsestr(stanza.strip("\n"), headersonly=True)
        if not fields["Package"] or "installed" not in (fields["Status"] or "").split():
            continue
        summary = (fields["Description"] or "").split("\n")[0]
        found.append(
            Package("debian", fields["Package"], fields["Version"] or "", fields["Architecture"] or "", summary=summary)
        )
    return found


def _distributions(told: list[dict[str, Any]], wheels: Path | None) -> list[Package]:
    from packaging.utils import canonicalize_name

    names = [(canonicalize_name(str(one["name"])), str(one["version"])) for one in told]
    hashes = _hashes(wheels, frozenset(names)) if wheels is not None else {}
    found = []
    for (name, version), one in zip(names, told, strict=True):
        found.append(
            Package(
                "python", name, version, licence=str(one["licence"]), licence_name=str(one["licence_name"]),
                summary=str(one["summary"]), sha256=hashes.get((name, version), ""),
            )
        )  # fmt: skip
    return found


def _hashes(wheels: Path, wanted: Container[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """sha256 of each wanted wheel by name and version; where wheelhouses hold two of one version, none is claimed."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    files: dict[tuple[str, str], set[str]] = {}
    for path in sorted(wheels.glob("*/*.whl")):
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if (name, str(version)) in wanted:
            files.setdefault((name, str(version)), set()).add(sha256_file(path))
    return {known: next(iter(digests)) for known, digests in files.items() if len(digests) == 1}


def _fields(release: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in release.splitlines() if "=" in line)
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}
