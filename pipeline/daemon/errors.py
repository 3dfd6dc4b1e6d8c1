"""What can be wrong with an engine, one class per cause; all of them end with exit code 4."""

from __future__ import annotations

from pipeline.contract.errors import DockerError


class NoEngine(DockerError):
    """No Docker Engine answers and none can be started here."""


class SocketForbidden(DockerError):
    """The engine's socket is there but this user may not open it."""


class EngineSilent(DockerError):
    """An engine that was named explicitly does not answer."""


class AddressInvalid(DockerError):
    """DOCKER_HOST or a context holds something that is no engine address."""


class ContextUnknown(DockerError):
    """The docker context that is asked for does not exist or cannot be read."""


class SshMissing(DockerError):
    """An engine is named by ssh:// and the docker SDK cannot do ssh here."""


class NotDocker(DockerError):
    """Something answers that is not a Docker Engine."""


class EngineTooOld(DockerError):
    """An engine answers but lacks what the pipeline needs."""


class BuildxMissing(DockerError):
    """The docker CLI or its buildx plugin is missing or too old."""


class BuilderElsewhere(DockerError):
    """A buildx builder is asked for that is not the engine's own BuildKit."""


class InstallFailed(DockerError):
    """The engine's packages could not be installed."""


class StartFailed(DockerError):
    """The private engine did not come up."""


class StopFailed(DockerError):
    """The private engine did not go away."""


class StoreDiffers(DockerError):
    """The private engine runs with another image store than the one asked for."""


class EngineBusy(DockerError):
    """The private engine's lock cannot be had: another process holds it for too long, or it cannot be made."""
