"""A CycloneDX SBOM of an image: the Python distributions and Debian packages that are installed in it.

A program in a container of the image lists them; cyclonedx-python-lib, maintained by the standard's own project, writes
them. The same contents of the same image give the same bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from datetime import datetime
from email.parser import Parser
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from pipeline.contract.digest import sha256_file
from pipeline.contract.errors import PublishError

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
    found.append(dict(name=get("Name"), version=d.version, summary=get("Summary") or "",
                      licence=get("License-Expression") or (get("License") or "").split("\\n")[0][:100]))
print(json.dumps(dict(distributions=found, status=text("{_STATUS}"), release=text("{_RELEASE}"))))
"""


def installed(run: Callable[[Sequence[str]], str], wheels: Path) -> tuple[Component, ...]:
    """What is installed in an image, by a program that `run` starts in a container of it; its stdout is returned.

    `wheels` is the folder of wheelhouses: a distribution whose wheel lies there is given the wheel's sha256. Raises
    `PublishError`.
    """
    stdout = run(["python3", "-c", _LOOK])
    try:
        listed = json.loads(stdout)
        found = [*_distributions(listed["distributions"], wheels), *_debian(listed["status"], listed["release"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PublishError("python3 in the image did not list what is installed", hint="an SBOM needs that") from error
    return tuple({str(one.purl): one for one in found}.values())


def make(packages: Sequence[Component], *, name: str, digest: str, created: datetime) -> bytes:
    """The SBOM of an image of the repository `name` as JSON.

    `digest` is that of the image's manifest; `created` is the image's time, not the clock's.
    """
    whole = Component(name=name, version=digest, type=ComponentType.CONTAINER, bom_ref=digest)
    bom = Bom(serial_number=uuid.uuid5(_SPACE, f"{name}@{digest}"), components=packages)
    bom.metadata.timestamp = created
    bom.metadata.component = whole
    bom.register_dependency(whole, packages)
    return (make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2) + "\n").encode()


def _distributions(listed: list[dict[str, Any]], wheels: Path) -> Iterator[Component]:
    names = [(canonicalize_name(one["name"]), str(one["version"])) for one in listed]
    hashes = _hashes(wheels, frozenset(names))
    for (name, version), one in zip(names, listed, strict=True):
        sha256 = hashes.get((name, version))
        yield _component(
            PackageURL("pypi", None, name, version),
            one["summary"],
            licenses=[LicenseFactory().make_from_string(one["licence"])] if one["licence"] else [],
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
        )


def _debian(status: str, release: str) -> Iterator[Component]:
    """The installed packages of dpkg's status file, in the distribution that os-release names."""
    system = {name: value.strip("\"'") for name, _, value in (line.partition("=") for line in release.splitlines())}
    distribution, version = system.get("ID", "debian"), system.get("VERSION_ID", "")
    for stanza in status.split("\n\n"):
        fields = Parser().parsestr(stanza.strip("\n"), headersonly=True)
        if not fields["Package"] or "installed" not in (fields["Status"] or "").split():
            continue
        about = {
            "arch": fields["Architecture"] or "",
            "distro": f"{distribution}-{version}" if version else distribution,
        }
        yield _component(
            PackageURL("deb", distribution, fields["Package"], fields["Version"] or "", about),
            (fields["Description"] or "").split("\n")[0],
        )


def _component(purl: PackageURL, summary: str, **more: Any) -> Component:  # noqa: ANN401 - licenses and hashes
    return Component(
        name=purl.name,
        version=purl.version,
        type=ComponentType.LIBRARY,
        bom_ref=str(purl),
        purl=purl,
        description=summary or None,
        **more,
    )


def _hashes(wheels: Path, wanted: Container[tuple[str, str]]) -> Mapping[tuple[str, str], str]:
    """sha256 of each wanted wheel by name and version; where wheelhouses hold two of one version, none is claimed."""
    files: dict[tuple[str, str], set[str]] = {}
    for path in sorted(wheels.glob("*/*.whl")):
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if (name, str(version)) in wanted:
            files.setdefault((name, str(version)), set()).add(sha256_file(path))
    return {known: next(iter(digests)) for known, digests in files.items() if len(digests) == 1}
