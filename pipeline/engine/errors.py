"""What can be wrong with an engine, one class per cause; all of them end with exit code 4."""

from __future__ import annotations

from pipeline.contract.errors import EngineError


class NoEngine(EngineError):
    """No Docker Engine answers and none can be started here."""


class SocketForbidden(EngineError):
    """The engine's socket is there but this user may not open it."""


class EngineSilent(EngineError):
    """An engine that was named explicitly does not answer."""


class AddressInvalid(EngineError):
    """DOCKER_HOST or a context holds something that is no engine address."""


class ContextUnknown(EngineError):
    """The docker context that is asked for does not exist or cannot be read."""


class SshMissing(EngineError):
    """An engine is named by ssh:// and the docker SDK cannot do ssh here."""


class NotDocker(EngineError):
    """Something answers that is not a Docker Engine."""


class EngineTooOld(EngineError):
    """An engine answers but lacks what the pipeline needs."""


class BuildxMissing(EngineError):
    """The docker CLI or its buildx plugin is missing or too old."""


class BuilderElsewhere(EngineError):
    """A buildx builder is asked for that is not the engine's own BuildKit."""


class InstallFailed(EngineError):
    """The engine's packages could not be installed."""


class StartFailed(EngineError):
    """The private engine did not come up."""


class StopFailed(EngineError):
    """The private engine did not go away."""


class StoreDiffers(EngineError):
    """The private engine runs with another image store than the one asked for."""


class EngineBusy(EngineError):
    """The private engine's lock cannot be had: another process holds it for too long, or it cannot be made."""
