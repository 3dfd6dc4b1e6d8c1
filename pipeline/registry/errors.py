"""What can go wrong with a registry. All of it ends with 8; a wrong name or setting is a `UsageError`."""

from __future__ import annotations

from pipeline.contract.errors import PublishError

_FULL = ("no space left", "quota", "insufficient storage", "storage limit", "out of space", "'err': 28}", "'err': 122}")


class RegistryError(PublishError):
    """The registry refused, failed, or did not answer."""


class NotFound(RegistryError):
    """The registry has no such repository, manifest or blob."""


class InvalidResponse(RegistryError):
    """The answer is not what the OCI distribution specification has, or its content has another digest."""


class TransientError(Exception):
    """A failure that may pass. `cause` is what to raise when it does not, `retry_after` the registry's own wish in
    seconds; None where it has none.
    """

    def __init__(self, cause: PublishError, retry_after: float | None = None) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.retry_after = retry_after


def refusal(status: int, words: str, what: str, server: str) -> RegistryError:  # noqa: PLR0911 - a table
    """What a status that is no success means; `words` are the registry's own."""
    message = f"{what}: {server} answered {status}" + (f" ({words})" if words else "")
    low = words.lower()
    if status in (413, 507) or any(sign in low for sign in _FULL):
        hint = "make room in the registry or raise its quota, then run it again"
        return RegistryError(f"{what}: {server} has no room: it answered {status} ({words})", hint=hint)
    if status == 401:
        return RegistryError(message, hint=f"`docker login {server}`; credentials are read from Docker's config.json")
    if status == 403:
        return RegistryError(message, hint=f"check this user's rights, or `docker login {server}` as another")
    if status == 404:
        return NotFound(message, hint="check the name; some registries want a repository to be made first")
    if status == 429:
        return RegistryError(message, hint="run it again later: what is there is not pushed again")
    if "digest_invalid" in low:
        return InvalidResponse(message, hint="something on the way changes what is sent: a proxy?")
    if status >= 500:
        return RegistryError(message, hint="look at the registry's own log, then run it again")
    if status >= 400:
        return RegistryError(message, hint="the registry does not take this; its log says why")
    return InvalidResponse(message, hint=f"is {server} a registry?")
