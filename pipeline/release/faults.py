"""What can be wrong with a release itself, one class per cause; what a registry answers is in `errors`."""

from __future__ import annotations

from pipeline.contract.errors import CacheRefused, PublishError, UsageError


class NotReplayed(PublishError):
    """No replay verdict stands for this image, and no verdict that was given does."""


class VerdictsUnreadable(CacheRefused):
    """A verdict that was named is not there, or is no verdict."""


class CachesOfAnother(CacheRefused):
    """A cell's caches were tuned for another model, another layout or another GPU than the cell names."""


class TagTaken(PublishError):
    """An immutable tag stands for another image; it is never moved."""


class TagsClash(UsageError):
    """Two cells of one release would have the same tag."""


class CellsInvalid(UsageError):
    """Cells of a matrix that no image can be planned for."""


class AnnotationsInvalid(UsageError):
    """Annotations of the user that an image cannot carry, or that are ours."""


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


class ExportBroken(PublishError):
    """What BuildKit exported is not the image that was verified."""


class NotAsPushed(PublishError):
    """What the registry gives back is not what was pushed: another config, or without its annotations."""
