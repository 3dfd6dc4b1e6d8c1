"""The base image: the one that was asked for, the pinned default, or the same OS bootstrapped from Debian packages."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.contract.digest import sha256_json
from pipeline.contract.errors import BuildError, DockerError, UsageError
from pipeline.contract.files import alone, scratch, write_json
from pipeline.run import ProcessFailed, run

from .containers import ContainerSpec, run_one
from .names import split
from .session import Session, drop_image, made_at

if TYPE_CHECKING:
    from docker import DockerClient

BASE_NAME = "tuned-image-pipeline/base"
COMPILER_NAME = "tuned-image-pipeline/compiler"
SERVER_NAME = "tuned-image-pipeline/server"  # what a CPU server needs below its wheels
# Debian packages of what is bootstrapped; with a C++ compiler where FlashInfer's modules are compiled.
_INCLUDE = {
    BASE_NAME: "python3,ca-certificates",
    COMPILER_NAME: "python3,ca-certificates,g++",
    SERVER_NAME: "python3,python3-dev,python3-venv,ca-certificates,g++,libnuma1",
}
# What no container needs: manual pages, documentation, translations. Copyright files stay.
_LEAN = (
    "path-exclude=/usr/share/man/*", "path-exclude=/usr/share/locale/*", "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright",
)  # fmt: skip
# BuildKit mounts a file over /etc/hosts. Where there is none it makes one and removes it, which leaves /etc in the
# layer, with the time of the build: the same RUN step would give another layer each time.
_HOSTS = '--customize-hook=touch "$1/etc/hosts"'
_VERSIONS = {BASE_NAME: 4, COMPILER_NAME: 3, SERVER_NAME: 3}  # one more makes an image anew
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RENEW_DAYS = 30  # a bootstrapped base that is older misses security updates
_PULL = "pull or load a base image yourself and give BASE_IMAGE (--base-image), or install mmdebstrap"


@dataclass(frozen=True)
class Base:
    """A base image that is present in the engine. `origin` is `given`, `pulled`, `present`, `bootstrapped` or `built`.

    `digest` is that of its registry, empty where it has none; `config` is its configuration. `pinned` is the reference
    by digest, which the engine knows without asking the registry; empty where it has none under this name.
    """

    reference: str
    image_id: str
    origin: str
    digest: str
    config: Mapping[str, Any]
    pinned: str = ""


def find(client: DockerClient, reference: str, origin: str) -> Base | None:
    """An image that the engine has; None where it has none of that name."""
    from docker.errors import APIError, ImageNotFound

    try:
        attrs = client.images.get(reference).attrs
    except ImageNotFound:
        return None
    except APIError as error:
        if "invalid reference" in str(error):
            raise UsageError(f"{reference!r} is not an image reference", hint="such as debian:12-slim") from error
        raise
    known = [str(one) for one in attrs.get("RepoDigests") or ()]
    digest = known[0].partition("@")[2] if known else ""
    pinned = next((one for one in known if one.partition("@")[0] == split(reference.partition("@")[0])[0]), "")
    return Base(reference, str(attrs["Id"]), origin, digest, attrs.get("Config") or {}, pinned)


def obtain(session: Session, *, wanted: str, default: str, suite: str) -> Base:
    """Return a base that is present in the engine.

    `wanted` is the user's choice (empty: none); it is pulled when absent and never replaced. `default` is the pinned
    reference. Where no registry answers, Debian `suite` is bootstrapped instead.
    """
    asked = wanted or default
    here = find(session.client, asked, "given" if wanted else "present")
    if here is not None:
        return here
    if not wanted and find(session.client, _reference(BASE_NAME, suite), "bootstrapped") is not None:
        return obtain_bootstrapped(session, BASE_NAME, suite)
    try:
        with log.step(f"pull {asked}"):
            return _pull(session.client, asked)
    except BuildError as error:
        if wanted:
            raise
        log.warn(f"{error.message}; bootstrapping Debian {suite} from its packages instead")
        return obtain_bootstrapped(session, BASE_NAME, suite)


def obtain_compiler(session: Session, base: Base, *, default: str, wanted: str, suite: str) -> Base:
    """The image with a C++ compiler that goes with `base`: the same operating system and the same Python.

    A base that somebody gave (`wanted`) must bring the compiler itself, which the caller has checked. Beside the pinned
    base stands `default`; beside a bootstrapped one a bootstrapped one.
    """
    if wanted:
        return base
    if base.origin == "bootstrapped":
        return obtain_bootstrapped(session, COMPILER_NAME, suite)
    return obtain(session, wanted=default, default="", suite=suite)


def obtain_bootstrapped(session: Session, name: str, suite: str) -> Base:
    """The Debian called `name`, made where there is none, and made again where it is older than `RENEW_DAYS`."""
    reference = _reference(name, suite)
    here = find(session.client, reference, "bootstrapped")
    if here is None:
        return _bootstrap(session, reference, suite)
    made = made_at(session.client.images.get(reference).attrs)
    when, days = time.strftime("%Y-%m-%d", time.gmtime(made)), (time.time() - made) / 86_400
    if days <= RENEW_DAYS:
        log.note(f"base made on {when}, {_record(session, reference)} lists its packages")
        return here
    log.note(f"base made on {when}, older than {RENEW_DAYS} days: made again")
    try:
        renewed = _bootstrap(session, reference, suite, older_than=made)
    except BuildError as error:
        log.warn(f"{reference} is {days:.0f} days old and cannot be renewed: {error.message}")
        return here
    drop_image(session.client, here.image_id)  # stays where an image is built on it
    return renewed


def _pull(client: DockerClient, reference: str) -> Base:
    """Pull an image. Raises `BuildError` with the engine's reason."""
    from docker.errors import APIError
    from requests.exceptions import RequestException

    try:
        client.api.pull(reference)
    except (APIError, RequestException) as error:
        why = str(getattr(error, "explanation", None) or error).strip().splitlines()[-1][:300]
    else:
        found = find(client, reference, "pulled")
        if found is not None:
            return found
        why = "the Docker Engine pulled it but does not have it"
    raise BuildError(
        f"base image {reference} is not in the Docker Engine and cannot be pulled: {why}",
        hint="`docker login` if it is private; or `docker load` it; or leave BASE_IMAGE out",
    )


def _reference(name: str, suite: str) -> str:
    """The reference of an image that is bootstrapped here, by all that decides its content."""
    recipe = {"suite": suite, "include": _INCLUDE[name], "lean": _LEAN, "version": _VERSIONS[name]}
    return f"{name}:{suite}-{sha256_json(recipe)[:12]}"


def _record(session: Session, reference: str) -> Path:
    """The file that says which packages a bootstrapped base has."""
    return session.home / "base" / f"{reference.replace('/', '-').replace(':', '-')}.json"


def _bootstrap(session: Session, reference: str, suite: str, *, older_than: float = 0.0) -> Base:
    """Bootstrap, or take what another run bootstrapped meanwhile (newer than `older_than`)."""
    folder = session.home / "base"
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, lambda: log.note("waiting for another run, which bootstraps a base")):
        here = find(session.client, reference, "bootstrapped")
        if here is not None and made_at(session.client.images.get(reference).attrs) > older_than:
            return here
        work = folder / "bootstrap"
        work.mkdir(exist_ok=True)
        with scratch(work, ".bootstrap-") as temporary, log.step(f"bootstrap Debian {suite} with mmdebstrap"):
            tar = temporary / "base.tar"
            _mmdebstrap(session, reference.rpartition(":")[0], suite, tar)
            repository, _, tag = reference.rpartition(":")
            session.client.api.import_image(
                src=str(tar), repository=repository, tag=tag, changes=[f"ENV PATH={_PATH}", 'CMD ["/bin/bash"]']
            )
    found = find(session.client, reference, "bootstrapped")
    if found is None:
        raise BuildError(f"the Docker Engine did not import the bootstrapped {suite}", log=str(session.log))
    said = run_one(session.client, reference, ["dpkg-query", "--show"], ContainerSpec(), timeout=120).stdout
    packages = dict(line.split("\t") for line in said.splitlines())
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(_record(session, reference), {"image": found.image_id, "created": made, "packages": packages})
    return found


def _mmdebstrap(session: Session, name: str, suite: str, tar: Path) -> None:
    """Write the Debian called `name` into `tar`, whose folder is the scratch folder too."""
    words = [
        *_alone_in_namespaces(), _program(session), "--variant=minbase", f"--include={_INCLUDE[name]}",
        '--aptopt=Acquire::Languages "none"', *(f"--dpkgopt={rule}" for rule in _LEAN), _HOSTS, suite, str(tar),
        *_mirrors(suite),
    ]  # fmt: skip
    try:
        run(words, env={"TMPDIR": str(tar.parent)}, log=session.log)
    except ProcessFailed as error:
        raise BuildError(
            f"mmdebstrap could not build Debian {suite}",
            details=error.details,
            log=str(session.log),
            hint="check this host's apt sources (`apt-get update`), or give BASE_IMAGE (--base-image)",
        ) from error


def _alone_in_namespaces() -> list[str]:
    """Words that let a program and its mounts end with us, whatever ends us: SIGKILL leaves no mount on the host.

    mmdebstrap mounts /proc, /sys and /dev below its temporary folder. In namespaces of its own the kernel takes these
    away with its last process; `setpriv` asks for the end of that when this process ends.
    """
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
    if os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("unshare"):
        return []
    try:
        run([*words, "true"], capture=True, timeout=30)
    except ProcessFailed:  # a container that may not make namespaces
        return []
    return words


def _program(session: Session) -> str:
    found = shutil.which("mmdebstrap")
    if found:
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BuildError("no registry answers, and mmdebstrap is not installed", hint=_PULL)
    from pipeline.daemon import debian

    try:
        debian.install(["mmdebstrap"], session.log)
    except DockerError as error:
        raise BuildError(
            "mmdebstrap cannot be installed", details=error.details, hint=_PULL, log=str(session.log)
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
