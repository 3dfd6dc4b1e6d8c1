"""Programs of Debian that tests drive, installed by root where they are missing; nothing of it starts as a service."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from pipeline.engine import apt, osrelease, packages
from pipeline.engine.errors import InstallFailed

# program -> package; what Debian 12 lacks comes from Debian 13, by the source that the engine's packages come by
PACKAGES = {
    "docker-registry": "docker-registry", "skopeo": "skopeo", "htpasswd": "apache2-utils", "openssl": "openssl",
    "cosign": "cosign", "oras": "oras",
}  # fmt: skip


def ensure(*programs: str) -> None:
    """Install what is missing. Only a person who is not root, outside CI, may go without."""
    missing = [PACKAGES[name] for name in programs if packages.program(name) is None]
    if not missing:
        return
    if os.geteuid() != 0 and os.environ.get("CI") != "true":
        pytest.skip(f"needs {', '.join(missing)}, and only root can install it")
    log = Path(tempfile.mkstemp(prefix="apt-", suffix=".log")[1])
    try:
        packages.install(osrelease.here(), tuple(missing), log)
    except InstallFailed as error:
        raise AssertionError(f"{error.message}\n" + "\n".join(error.details) + log.read_text()[-2000:]) from error
    assert apt.host_sources()
    assert [name for name in programs if shutil.which(name) is None] == []
