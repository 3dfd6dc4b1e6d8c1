"""The base image: the one that was asked for, the pinned default, or the same OS bootstrapped from Debian packages."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import BuildError, DockerError, UsageError
from pipeline.run import ProcessFailed, run

if TYPE_CHECKING:
    from docker import DockerClient

BOOTSTRAP_NAME = "tuned-image-pipeline/base"
COMPILER_NAME = "tuned-image-pipeline/compiler"
# Debian packages of what is bootstrapped; with a C++ compiler where FlashInfer's modules are compiled.
_INCLUDE = {
    BOOTSTRAP_NAME: "python3,ca-certificates",
    COMPILER_NAME: "python3,ca-certificates,g++",
}
# What no container needs: manual pages, documentation, translations. Copyright files stay.
_LEAN = (
    "path-exclude=/usr/share/man/*", "path-exclude=/usr/share/locale/*", "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright",
)  # fmt: skip


class BaseUnavailable(BuildError):
    """The base image is neither here nor to be had from a registry."""


class CannotBootstrap(BuildError):
    """No registry answers and this host cannot bootstrap Debian."""


class BaseNameInvalid(UsageError):
    """BASE_IMAGE is not an image reference."""


@dataclass(frozen=True)
class Base:
    """A base image that is present in the engine. `origin` is `given`, `pulled`, `present` or `bootstrapped`."""

    reference: str
    image_id: str
    origin: str


def _present(client: DockerClient, reference: str) -> str | None:
    from docker.errors import APIError, ImageNotFound

    try:
        return str(client.images.get(reference).id)
    except ImageNotFound:
        return None
    except APIError as error:
        if "invalid reference" in str(error):
            raise BaseNameInvalid(f"{reference!r} is not an image reference", hint="such as debian:12-slim") from error
        raise


def _pull(client: DockerClient, reference: str) -> str:
    """Pull, and return the reason when that fails (empty: it worked)."""
    from docker.errors import APIError
    from requests.exceptions import RequestException

    try:
        client.api.pull(reference)
    except (APIError, RequestException) as error:
        return str(getattr(error, "explanation", None) or error).strip().splitlines()[-1][:300]
    return "" if _present(client, reference) else "the engine pulled it but does not have it"


def present(client: DockerClient, *, wanted: str, default: str, suite: str) -> Base | None:
    """The base that `obtain` would return, when the engine has it already; nothing is pulled or made."""
    if wanted:
        found = _present(client, wanted)
        return Base(wanted, found, "given") if found else None
    for reference, origin in ((default, "present"), (_bootstrapped(BOOTSTRAP_NAME, suite), "bootstrapped")):
        found = _present(client, reference)
        if found:
            return Base(reference, found, origin)
    return None


def obtain(client: DockerClient, *, wanted: str, default: str, suite: str, home: Path, logfile: Path) -> Base:
    """Return a base that is present in the engine.

    `wanted` is the user's choice (empty: none); it is pulled when absent and never replaced. `default` is the pinned
    reference; where no registry answers, Debian `suite` is bootstrapped instead, and that is said.
    """
    here = present(client, wanted=wanted, default=default, suite=suite)
    if here is not None:
        return here
    asked = wanted or default
    with log.step(f"pull {asked}"):
        why = _pull(client, asked)
        if why and wanted:
            raise BaseUnavailable(
                f"base image {wanted} is not in the engine and cannot be pulled: {why}",
                hint="`docker login` if it is private; or `docker load` it; or leave BASE_IMAGE out",
            )
    if not why:
        return Base(asked, str(_present(client, asked)), "pulled")
    log.warn(f"{default} cannot be pulled ({why}); bootstrapping Debian {suite} from its packages instead")
    bootstrapped = _bootstrapped(BOOTSTRAP_NAME, suite)
    _bootstrap(client, bootstrapped, suite, home, logfile)
    return Base(bootstrapped, str(_present(client, bootstrapped)), "bootstrapped")


def obtain_compiler(
    client: DockerClient, base: Base, *, default: str, wanted: str, suite: str, home: Path, logfile: Path
) -> Base:
    """The image with a C++ compiler that goes with `base`: the same operating system and the same Python.

    A base that somebody gave (`wanted`) must bring the compiler itself, which the caller has seen to. Beside the pinned
    base stands `default`; beside a bootstrapped one a bootstrapped one.
    """
    if wanted:
        return base
    if base.origin != "bootstrapped":
        return obtain(client, wanted=default, default="", suite=suite, home=home, logfile=logfile)
    reference = _bootstrapped(COMPILER_NAME, suite)
    if not _present(client, reference):
        _bootstrap(client, reference, suite, home, logfile)
    return Base(reference, str(_present(client, reference)), "bootstrapped")


def _bootstrapped(name: str, suite: str) -> str:
    """The reference of an image that is bootstrapped here, by all that decides its content."""
    recipe = {"suite": suite, "include": _INCLUDE[name], "lean": _LEAN, "version": 2}
    return f"{name}:{suite}-{sha256_json(recipe)[:12]}"


def _bootstrap(client: DockerClient, reference: str, suite: str, home: Path, logfile: Path) -> None:
    program = _mmdebstrap(logfile)
    (home / "base").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home / "base", prefix=".bootstrap-") as temporary:
        tar = Path(temporary) / "base.tar"
        command = [
            program,
            "--variant=minbase",
            f"--include={_INCLUDE[reference.rpartition(':')[0]]}",
            '--aptopt=Acquire::Languages "none"',
        ]
        command += [f"--dpkgopt={rule}" for rule in _LEAN]
        with log.step(f"bootstrap Debian {suite} with mmdebstrap"):
            try:
                run([*command, suite, str(tar), *_mirrors(suite)], log=logfile)
            except ProcessFailed as error:
                raise CannotBootstrap(
                    f"mmdebstrap could not build Debian {suite}", details=error.details, log=str(logfile),
                    hint="check this host's apt sources (`apt-get update`), or give BASE_IMAGE",
                ) from error  # fmt: skip
        with log.step(f"import it as {reference}"):
            repository, _, tag = reference.rpartition(":")
            client.api.import_image(
                src=str(tar), repository=repository, tag=tag,
                changes=["ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 'CMD ["/bin/bash"]'],
            )  # fmt: skip
            if not _present(client, reference):
                raise CannotBootstrap(f"the engine did not take the bootstrapped {suite}", log=str(logfile))


def _mmdebstrap(logfile: Path) -> str:
    found = shutil.which("mmdebstrap")
    if found:
        return found
    hint = "pull or load a base image yourself and give BASE_IMAGE, or install mmdebstrap"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotBootstrap("no registry answers, and mmdebstrap is not installed", hint=hint)
    from pipeline.daemon import debian

    try:
        debian.install(["mmdebstrap"], logfile)
    except DockerError as error:
        raise CannotBootstrap(
            "mmdebstrap cannot be installed", details=error.details, hint=hint, log=str(logfile)
        ) from error
    return "mmdebstrap"


def _mirrors(suite: str) -> list[str]:
    """Sources of `suite` as one-line entries made from the host's own, so that its mirror and keys serve.

    Nothing when the host has none for this suite: mmdebstrap then takes its own default.
    """
    from pipeline.daemon import debian

    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    signed = f"[signed-by={keyring}] " if Path(keyring).exists() else ""
    return [
        f"deb {signed}{mirror} {part} main"
        for part in (suite, f"{suite}-updates", f"{suite}-security")
        for mirror in debian.mirrors(part)
    ]
