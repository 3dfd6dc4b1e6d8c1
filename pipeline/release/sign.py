"""cosign signatures by a key: made and checked by digest, without a public transparency log unless asked.

cosign is handed nothing secret by argument: the key is a file or `env://NAME`, its password is in `COSIGN_PASSWORD`,
and the registry's login lies in a config.json of its own for the time that it runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.digest import sha256_bytes
from pipeline.contract.text import shown
from pipeline.registry.client import Registry
from pipeline.registry.credentials import docker_config
from pipeline.registry.errors import ReferenceInvalid
from pipeline.registry.reference import Reference
from pipeline.registry.trust import authorities, client_certificates, is_plain
from pipeline.run import ProcessFailed, ProgramMissing, find_program, run

from .faults import CosignMissing, KeyUnusable, SigningFailed

PASSWORD = "COSIGN_PASSWORD"  # the variable's name, not a password  # noqa: S105
_BY_VARIABLE = "env://"
_TIMEOUT = 300.0  # seconds
_SHORTEST = 2  # characters of a repository's name, by the library with which cosign reads it
_HINT = (
    "Debian 13 has it: `apt-get install cosign` (on Debian 12 once `pipeline daemon up` "
    "has added Debian 13's source, pinned); elsewhere it is one static program: put it on PATH"
)


@dataclass(frozen=True)
class Signer:
    """A private key, as a file or `env://NAME`, and whether signatures go into the public transparency log."""

    key: str
    transparency_log: bool = False

    def check(self) -> None:
        """Look before anything is pushed: raise `CosignMissing` or `KeyUnusable`."""
        _cosign()
        check_key(self.key)
        if PASSWORD not in os.environ:
            raise KeyUnusable(
                f"{PASSWORD} is not set, and {shown(self.key)} is encrypted with it",
                hint=f"export {PASSWORD}, empty where the key has no password",
            )

    def open(self) -> str:
        """As `check`, and let cosign open the key, so that a wrong password is told before any work.

        Returns the sha256 of its public key: which key it is.
        """
        self.check()
        return sha256_bytes(_public_key(self).encode())


def check_key(key: str) -> None:
    """Raise `KeyUnusable` when a key, private or public, is neither a readable file nor `env://NAME` that is set."""
    if key.startswith(_BY_VARIABLE):
        if not os.environ.get(key.removeprefix(_BY_VARIABLE)):
            raise KeyUnusable(
                f"{shown(key)}: that variable is not set", hint="env://NAME names a variable with the key"
            )
        return
    try:
        begun = Path(key).read_bytes()[:64] if Path(key).is_file() else b""
    except OSError as error:
        raise KeyUnusable(f"{shown(key)} cannot be read: {error.strerror}") from error
    if not begun.startswith(b"-----BEGIN "):
        raise KeyUnusable(
            f"{shown(key)} is not a key file" if begun else f"there is no key file {shown(key)}",
            hint="`cosign generate-key-pair` makes cosign.key and cosign.pub",
        )


def check_name(reference: Reference) -> None:
    """Raise `ReferenceInvalid` for a repository that cosign cannot name."""
    if len(reference.repository) < _SHORTEST:
        raise ReferenceInvalid(
            f"{reference.name}: cosign takes no repository of one letter", hint="choose a longer name, or do not sign"
        )


def signature_tag(digest: str) -> str:
    """Where cosign keeps the signatures of a digest."""
    return digest.replace(":", "-", 1) + ".sig"


def sign(registry: Registry, subject: Reference, signer: Signer, *, log: Path | None = None) -> bool:
    """Sign `subject`, which has a digest; False where this key has signed it already.

    Raises `CosignMissing`, `KeyUnusable`, or `SigningFailed` with cosign's last lines.
    """
    assert subject.digest, "only a digest is signed: a tag may move meanwhile"
    signer.check()
    if registry.resolve(subject.repository, signature_tag(subject.digest)) and is_signed_by(registry, subject, signer):
        return False
    words = ["sign", "--yes", f"--tlog-upload={str(signer.transparency_log).lower()}", f"--key={signer.key}"]
    with _prepared(registry, subject, secrets=_secrets(signer.key)) as (options, env):
        try:
            run([_cosign(), *words, *options, str(subject.at(subject.digest))], env=env, log=log, timeout=_TIMEOUT)
        except ProcessFailed as error:
            raise SigningFailed(
                f"cosign could not sign {subject}: {_last(error)}",
                hint=f"is {PASSWORD} the key's password, and may this user push to the repository?",
                details=error.details,
                log=error.log,
            ) from error
    return True


def verify(registry: Registry, subject: Reference, key: str, *, transparency_log: bool = False) -> str:
    """Check that `key` (public: a file or `env://NAME`) signed the digest of `subject`.

    Returns what is wrong as one line, empty when nothing is. Raises `CosignMissing` or `KeyUnusable`.
    """
    check_key(key)
    words = ["verify", f"--insecure-ignore-tlog={str(not transparency_log).lower()}", f"--key={key}"]
    variable = {key.removeprefix(_BY_VARIABLE): os.environ[key.removeprefix(_BY_VARIABLE)]} if _by_variable(key) else {}
    with _prepared(registry, subject, secrets=variable) as (options, env):
        try:
            run([_cosign(), *words, *options, str(subject.at(subject.digest))], env=env, capture=True, timeout=_TIMEOUT)
        except ProcessFailed as error:
            return _last(error)
    return ""


def is_signed_by(registry: Registry, subject: Reference, signer: Signer) -> bool:
    """Whether this key signed the digest of `subject`. Raises `CosignMissing` or `KeyUnusable`."""
    with tempfile.TemporaryDirectory(prefix="key-") as folder:
        public = Path(folder) / "cosign.pub"
        public.write_text(_public_key(signer), encoding="utf-8")
        return verify(registry, subject, str(public), transparency_log=signer.transparency_log) == ""


@functools.cache
def _public_key(signer: Signer) -> str:
    """The public key of a private one, asked of cosign once. Raises `KeyUnusable`."""
    try:
        command = [_cosign(), "public-key", f"--key={signer.key}"]
        return run(command, env=_secrets(signer.key), capture=True, timeout=_TIMEOUT).stdout
    except ProcessFailed as error:
        raise KeyUnusable(
            f"cosign cannot use {shown(signer.key)}: {_last(error)}", hint=f"is {PASSWORD} its password?"
        ) from error


def _by_variable(key: str) -> bool:
    return key.startswith(_BY_VARIABLE)


def _secrets(key: str) -> dict[str, str]:
    """What cosign alone is told: run() hands these variables to no child by itself."""
    names = [PASSWORD, *([key.removeprefix(_BY_VARIABLE)] if _by_variable(key) else [])]
    return {name: os.environ[name] for name in names if name in os.environ}


@contextlib.contextmanager
def _prepared(
    registry: Registry, subject: Reference, *, secrets: Mapping[str, str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Options and environment for cosign: the registry's login and authorities, in files for as long as it runs."""
    with (
        docker_config(subject.registry, registry.credentials.login(subject.registry, subject.repository)) as config,
        tempfile.TemporaryDirectory(prefix="authorities-") as folder,
    ):
        options = ["--allow-http-registry=true"] if is_plain(subject.registry) else []
        trusted = list(authorities(subject.registry))
        bundle = os.environ.get("REQUESTS_CA_BUNDLE", "")
        trusted += [Path(bundle)] if bundle and Path(bundle).is_file() else []
        if trusted and not is_plain(subject.registry):
            whole = Path(folder) / "authorities.pem"
            whole.write_bytes(b"\n".join(path.read_bytes() for path in trusted))
            options.append(f"--registry-cacert={whole}")
        for certificate, private in client_certificates(subject.registry)[:1]:
            options += [f"--registry-client-cert={certificate}", f"--registry-client-key={private}"]
        yield options, {"DOCKER_CONFIG": str(config), **secrets}


def _cosign() -> str:
    try:
        return find_program("cosign", hint=_HINT)
    except ProgramMissing as error:
        raise CosignMissing("cosign is not installed, and signatures need it", hint=_HINT) from error


def _last(error: ProcessFailed) -> str:
    """cosign's own last words without its boilerplate, else how it ended."""
    said = [
        line for line in error.details if line.strip() and not line.startswith(("WARNING", "main.go", "error during"))
    ]
    words = next((line for line in reversed(said) if line.startswith("Error: ")), said[-1] if said else error.message)
    return shown(words.removeprefix("Error: "), 300)
