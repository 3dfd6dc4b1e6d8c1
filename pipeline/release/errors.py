"""What a registry can answer, one class per cause.

All end with 8, but for what is wrong with a name, a file of ours or a setting, which ends with 2.
"""

from __future__ import annotations

from pipeline.contract.errors import PublishError, UsageError


class ReferenceInvalid(UsageError):
    """A name is not `registry/repo[:tag][@digest]`."""


class CredentialsUnreadable(UsageError):
    """Docker's config.json, or a credential helper that it names, does not give what it should."""


class CertificatesUnreadable(UsageError):
    """A file of certificates that the configuration names cannot be read."""


class Unauthorized(PublishError):
    """The registry wants other credentials than it was given, or any at all."""


class NotInRegistry(PublishError):
    """The registry has no such repository, manifest or blob."""


class Refused(PublishError):
    """The registry understood and says no: denied, or it does not take what was sent."""


class RegistryFull(PublishError):
    """The registry has no room: 507, 413, a quota, or a full disk."""


class TooManyRequests(PublishError):
    """The registry limits how often it may be asked, for longer than we wait."""


class RegistryBroken(PublishError):
    """The registry answered 500, 502, 503 or 504 to every try."""


class RegistrySilent(PublishError):
    """No connection, no answer in time, or the connection was dropped at every try."""


class TlsFailed(PublishError):
    """The registry's certificate is not trusted here, or it does not speak TLS."""


class DigestMismatch(PublishError):
    """What was read or stored has another digest than the one asked for."""


class BlobBroken(PublishError):
    """A blob ended early, or is larger than what may be read."""


class AnswerInvalid(PublishError):
    """Something answers that does not speak the OCI distribution protocol."""


class AnnotationsLost(PublishError):
    """What was pushed came back without its annotations, or is not listed where it was attached."""


class SigningFailed(PublishError):
    """cosign could not sign."""


class CosignMissing(PublishError):
    """cosign is not installed."""


class KeyUnusable(UsageError):
    """A signing or verification key cannot be read, or its password is missing."""


class SignatureWrong(PublishError):
    """What must be signed by a key is not."""
