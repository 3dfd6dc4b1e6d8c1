"""A CycloneDX SBOM of an image: the Python distributions and Debian packages that are installed in it.

A program in a container of the image lists them; cyclonedx-python-lib, maintained by the standard's own project, writes
them. The same contents of the same image give the same bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.digest import sha256_file, sha256_json
from pipeline.contract.errors import PublishError

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License
    from packageurl import PackageURL

_STATUS = "/var/lib/dpkg/status"
_RELEASE = "/etc/os-release"
_SPACE = uuid.UUID("6f0ba2c4-6d1f-4d7c-9a70-0d7b6f3a6e55")  # any fixed one: serial numbers are made below it

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


def installed(run: Callable[[Sequence[str]], str], wheels: Path) -> Contents:
    """What is installed in an image, by a program that `run` starts in a container of it; its stdout is returned.

    `wheels` is the folder of wheelhouses: a distribution whose wheel lies there is given the wheel's sha256. Raises
    `PublishError`.
    """
    stdout = run(["python3", "-c", _LOOK])
    try:
        told = json.loads(stdout)
        packages = {*_distributions(told["distributions"], wheels), *debian_packages(str(told["status"]))}
        return Contents(tuple(sorted(packages)), _fields(str(told["release"])))
    except (ValueError, KeyError, TypeError) as error:
        raise PublishError("python3 in the image did not list what is installed", hint="an SBOM needs that") from error


def make(contents: Contents, *, name: str, digest: str, created: datetime) -> bytes:
    """The SBOM of an image of the repository `name` as JSON.

    `digest` is that of the image's manifest; `created` is the image's time, not the clock's.
    """
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion

    whole = Component(name=name, version=digest, type=ComponentType.CONTAINER, bom_ref=digest)
    seed = sha256_json([name, digest, [repr(package) for package in contents.packages]])
    bom = Bom(serial_number=uuid.uuid5(_SPACE, seed))
    bom.metadata.timestamp = created
    bom.metadata.component = whole
    parts = list(_components(contents))
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(whole, parts)
    return (make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2) + "\n").encode()


def _components(contents: Contents) -> Iterator[Component]:
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType

    for package in contents.packages:
        purl = _purl(package, contents)
        yield Component(
            name=package.name,
            version=package.version,
            type=ComponentType.LIBRARY,
            bom_ref=str(purl),
            purl=purl,
            description=package.summary or None,
            licenses=_licences(package),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)] if package.sha256 else [],
        )


def _purl(package: Package, contents: Contents) -> PackageURL:
    from packageurl import PackageURL

    if package.kind == "python":
        return PackageURL("pypi", None, package.name, package.version)
    system, version = contents.release.get("ID", "debian"), contents.release.get("VERSION_ID", "")
    qualifiers = {"arch": package.architecture, "distro": f"{system}-{version}" if version else system}
    return PackageURL("deb", system, package.name, package.version, qualifiers)


def _licences(package: Package) -> list[License]:
    from cyclonedx.contrib.license.factories import LicenseFactory

    said = package.licence or package.licence_name
    return [LicenseFactory().make_from_string(said)] if said else []


def debian_packages(status: str) -> list[Package]:
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


def _distributions(listed: list[dict[str, Any]], wheels: Path | None) -> list[Package]:
    from packaging.utils import canonicalize_name

    names = [(canonicalize_name(str(one["name"])), str(one["version"])) for one in listed]
    hashes = _hashes(wheels, frozenset(names)) if wheels is not None else {}
    found = []
    for (name, version), one in zip(names, listed, strict=True):
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
