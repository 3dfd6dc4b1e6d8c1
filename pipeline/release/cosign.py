"""Signatures by cosign: made and checked by digest, without a public transparency log unless asked.

A key is a file, `env://NAME`, or an address that cosign knows itself (`awskms://…`, `gcpkms://…`, `azurekms://…`,
`hashivault://…`, `k8s://…`, `pkcs11:…`); `keyless` signs with the identity of whoever runs it. cosign is handed nothing
secret by argument: the password of a key is in `COSIGN_PASSWORD`, and the registry's login lies in a config.json
while it runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.errors import PublishError, UsageError
from pipeline.contract.text import shown
from pipeline.registry.client import Registry
from pipeline.registry.credentials import authorities, client_certificates, docker_config, is_plain
from pipeline.registry.reference import Reference
from pipeline.run import ProcessFailed, ProgramMissing, find_program, run

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"  # cosign 3 stores signatures as such referrers
PASSWORD = "COSIGN_PASSWORD"  # the variable's name, not a password  # noqa: S105
KEYLESS = "keyless"
_VARIABLE = "env://"
_ADDRESS = re.compile(r"[a-z0-9]+://|pkcs11:")
_TIMEOUT = 300.0  # seconds
_HINT = (
    "Debian 13 has it: `apt-get install cosign` (on Debian 12 after `pipeline daemon up` has added Debian 13's source, "
    "pinned); elsewhere it is one static program: put it on PATH"
)


@dataclass(frozen=True)
class Signer:
    """Who signs: a key, or `keyless`; and whether signatures go into the public transparency log."""

    key: str
    transparency_log: bool = False

    def check(self) -> None:
        """Look before anything is built or pushed: cosign opens the key, wherever that lies.

        Raises `PublishError` without cosign, `UsageError` for a key that cannot be used.
        """
        _cosign()
        if self.key == KEYLESS:
            return
        if not _is_foreign(self.key):
            check_key(self.key)
            if PASSWORD not in os.environ:
                raise UsageError(
                    f"{PASSWORD} is not set, and {shown(self.key)} is encrypted with it",
                    hint=f"export {PASSWORD}, empty where the key has no password",
                )
        _public_key(self.key)

    def verifier(self, folder: Path) -> Verifier:
        """Who checks what this signer signed; a file key's public half is written below `folder`."""
        if self.key == KEYLESS or _is_foreign(self.key):
            return Verifier(self.key, transparency_log=self.transparency_log)
        public = folder / "cosign.pub"
        public.write_text(_public_key(self.key), encoding="utf-8")
        return Verifier(str(public), transparency_log=self.transparency_log)


@dataclass(frozen=True)
class Verifier:
    """What a signature must be of: a public key (file, `env://NAME`, or an address), or an identity and its issuer."""

    key: str = ""
    identity: str = ""
    issuer: str = ""
    transparency_log: bool = False

    def __bool__(self) -> bool:
        return bool(self.key or self.identity)

    def check(self) -> None:
        """Raise `PublishError` without cosign, `UsageError` for a key, before anything is asked."""
        if bool(self.identity) != bool(self.issuer) or (self.identity and self.key):
            raise UsageError(
                "--identity needs --issuer, --issuer needs --identity, and both exclude --key",
                hint="--identity https://github.com/ORG/REPO/.github/workflows/release.yml@refs/heads/main "
                "--issuer https://token.actions.githubusercontent.com",
            )
        if self.key and not _is_foreign(self.key):
            check_key(self.key)
        if self:
            _cosign()

    def __str__(self) -> str:
        return self.key or f"{self.identity} ({self.issuer})"


def check_key(key: str) -> None:
    """Raise `UsageError` when a key, private or public, is neither a readable file nor `env://NAME` that is set."""
    if key.startswith(_VARIABLE):
        if not os.environ.get(key.removeprefix(_VARIABLE)):
            raise UsageError(f"{shown(key)}: that variable is not set", hint="env://NAME names a variable with the key")
        return
    try:
        begun = Path(key).read_bytes()[:64] if Path(key).is_file() else b""
    except OSError as error:
        raise UsageError(f"{shown(key)} cannot be read: {error.strerror}") from error
    if not begun.startswith(b"-----BEGIN "):
        raise UsageError(
            f"{shown(key)} is not a key file" if Path(key).exists() else f"there is no key file {shown(key)}",
            hint="`cosign generate-key-pair` makes cosign.key and cosign.pub",
        )


def signature_tag(digest: str) -> str:
    """Where cosign 2 keeps the signatures of a digest."""
    return digest.replace(":", "-", 1) + ".sig"


def has_signature(registry: Registry, subject: Reference) -> bool:
    """Whether anybody signed the digest: under cosign 2's tag, or as a bundle among the referrers."""
    return any(_kinds(registry, subject))


def _kinds(registry: Registry, subject: Reference) -> tuple[bool, bool]:
    tag = registry.resolve(subject.repository, signature_tag(subject.digest)) is not None
    return tag, bool(registry.referrers(subject.repository, subject.digest, BUNDLE))


def sign(registry: Registry, subject: Reference, signer: Signer, *, log: Path | None = None) -> bool:
    """Sign `subject`, which has a digest; False where this key has signed it already.

    Raises `PublishError` with cosign's last lines, and what `Signer.check` raises.
    """
    assert subject.digest, "only a digest is signed: a tag may move meanwhile"
    if is_signed_by(registry, subject, signer):
        return False
    words = ["sign", "--yes"]
    if signer.key != KEYLESS:
        words += [f"--key={signer.key}", f"--tlog-upload={str(signer.transparency_log).lower()}"]
        if not signer.transparency_log and "--use-signing-config" in _options("sign"):  # cosign 3
            words.append("--use-signing-config=false")
    with _prepared(registry, subject, _environment(signer.key)) as (options, env):
        try:
            run([_cosign(), *words, *options, str(subject.at(subject.digest))], env=env, log=log, timeout=_TIMEOUT)
        except ProcessFailed as error:
            raise PublishError(
                f"cosign could not sign {subject}: {_last(error)}",
                hint=f"is {PASSWORD} the key's password, and may this user push to the repository?",
                details=error.details,
                log=error.log,
            ) from error
    return True


def verify(registry: Registry, subject: Reference, verifier: Verifier) -> str:
    """Check who signed the digest of `subject`; what is wrong as one line, empty when nothing is."""
    verifier.check()
    tag, bundle = _kinds(registry, subject)
    if not tag and not bundle:
        return "it has no signature"
    words = ["verify"]
    if verifier.identity:
        words += [f"--certificate-identity={verifier.identity}", f"--certificate-oidc-issuer={verifier.issuer}"]
    else:
        words += [f"--key={verifier.key}", f"--insecure-ignore-tlog={str(not verifier.transparency_log).lower()}"]
    knows_bundles = "--new-bundle-format" in _options("verify")
    why = ""
    with _prepared(registry, subject, _environment(verifier.key or KEYLESS)) as (options, env):
        for kind in [kind for kind, present in ((False, tag), (True, bundle)) if present]:
            flag = [f"--new-bundle-format={str(kind).lower()}"] if knows_bundles else []
            command = [_cosign(), *words, *flag, *options, str(subject.at(subject.digest))]
            try:
                run(command, env=env, capture=True, timeout=_TIMEOUT)
            except ProcessFailed as error:
                why = _last(error)
            else:
                return ""
    return why


def is_signed_by(registry: Registry, subject: Reference, signer: Signer) -> bool:
    """Whether this signer signed the digest already. Of a keyless one nobody can say: it signs again."""
    if signer.key == KEYLESS or not has_signature(registry, subject):
        return False
    with tempfile.TemporaryDirectory(prefix="key-") as folder:
        return verify(registry, subject, signer.verifier(Path(folder))) == ""


def _is_foreign(key: str) -> bool:
    """Whether cosign alone can say what is wrong with a key: it lies in a KMS or a token, or there is none."""
    return key == KEYLESS or (not key.startswith(_VARIABLE) and _ADDRESS.match(key) is not None)


@functools.cache
def _public_key(key: str) -> str:
    """The public key of a private one, asked of cosign once. Raises `UsageError`."""
    try:
        return run(
            [_cosign(), "public-key", f"--key={key}"], env=_environment(key), capture=True, timeout=_TIMEOUT
        ).stdout
    except ProcessFailed as error:
        raise UsageError(
            f"cosign cannot use {shown(key)}: {_last(error)}",
            hint="`cosign public-key --key …` tries an address" if _is_foreign(key) else f"is {PASSWORD} its password?",
        ) from error


def _environment(key: str) -> dict[str, str]:
    """What cosign is given beside the usual: the password, the key's variable; for a KMS, whose client reads its own
    variables, and for a keyless signature everything.
    """
    if _is_foreign(key):
        return dict(os.environ)
    names = [PASSWORD, *([key.removeprefix(_VARIABLE)] if key.startswith(_VARIABLE) else [])]
    return {name: os.environ[name] for name in names if name in os.environ}


@contextlib.contextmanager
def _prepared(
    registry: Registry, subject: Reference, environment: Mapping[str, str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Options and environment for cosign: the registry's login and certificates, in files for as long as it runs."""
    host = subject.registry
    login = registry.credentials.login(host, subject.repository)
    with docker_config(host, login) as config, tempfile.TemporaryDirectory(prefix="authorities-") as folder:
        options = ["--allow-http-registry=true"] if is_plain(host) else []
        trusted = list(authorities(host))
        bundle = Path(os.environ.get("REQUESTS_CA_BUNDLE", ""))
        trusted += [bundle] if bundle.is_file() else []
        if trusted and not is_plain(host):
            whole = Path(folder) / "authorities.pem"
            whole.write_bytes(b"\n".join(path.read_bytes() for path in trusted))
            options.append(f"--registry-cacert={whole}")
        for certificate, private in client_certificates(host)[:1]:
            options += [f"--registry-client-cert={certificate}", f"--registry-client-key={private}"]
        yield options, {**environment, "DOCKER_CONFIG": str(config)}


@functools.cache
def _options(action: str) -> frozenset[str]:
    """The options that this cosign knows for an action: 2 and 3 differ."""
    try:
        text = run([_cosign(), action, "--help"], capture=True, timeout=_TIMEOUT).stdout
    except ProcessFailed:
        return frozenset()
    return frozenset(re.findall(r"--[a-z][a-z-]+", text))


def _cosign() -> str:
    try:
        return find_program("cosign", hint=_HINT)
    except ProgramMissing as error:
        raise PublishError("cosign is not installed, and signatures need it", hint=_HINT) from error


def _last(error: ProcessFailed) -> str:
    """cosign's own last words without its boilerplate, else how it ended."""
    lines = [
        line for line in error.details if line.strip() and not line.startswith(("WARNING", "main.go", "error during"))
    ]
    words = next(
        (line for line in reversed(lines) if line.startswith("Error: ")), lines[-1] if lines else error.message
    )
    return shown(words.removeprefix("Error: "), 300)
