"""A CycloneDX SBOM of an image, for where BuildKit's scanner image cannot be had.

Written by cyclonedx-python-lib: maintained by the standard's own project, with a small closure; the schema's rules for
hashes, licences and package URLs are its business. The same contents give the same bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from pipeline.contract.digest import sha256_json

from .contents import Contents, Package

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License
    from packageurl import PackageURL

_SPACE = uuid.UUID("6f0ba2c4-6d1f-4d7c-9a70-0d7b6f3a6e55")  # any fixed one: serial numbers are made below it


def make(contents: Contents, *, name: str, digest: str, created: datetime) -> bytes:
    """The SBOM of an image of the repository `name` as JSON.

    `digest` names what it is a list of; `created` is the image's time, not the clock's.
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
