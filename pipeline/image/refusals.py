"""Why an engine did not start a container of a base image, from what it says: one error per cause, with its remedy."""

from __future__ import annotations

from pipeline.contract.errors import BuildError, PipelineError, UsageError

from .gpus import CdiUnknown, DriverTooOld, Gpus, NoGpu


class BaseWithoutPython(UsageError):
    """The base image has no usable Python 3."""


class ProbeFailed(BuildError):
    """A container of the base image did not start."""


class GpuFilesGone(UsageError):
    """What the engine was told to put into a container for its GPU is no longer on its host."""


_REGENERATE = "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
# runc's words, for files, device files and hooks of a CDI specification that was made before a driver's update.
_GONE = ("error mounting", "failed to stat CDI host device", "error running hook", "error running createContainer hook")


def refusal(image: str, offer: Gpus, said: str) -> PipelineError:
    """The error for what the engine `said` when a container of `image`, with the GPUs on `offer`, did not start."""
    of_gpus = _of_gpus(image, offer, said)
    if of_gpus is not None:
        return of_gpus
    if 'runtime "nvidia"' in said or "could not select device driver" in said:
        return NoGpu(
            f"the engine cannot give a container its GPUs: {said[:200]}",
            hint="install NVIDIA's container toolkit on the engine's host (`nvidia-ctk cdi generate`)",
        )
    if _missing(said):
        return BaseWithoutPython(
            f"base image {image} has no python3", hint="choose a BASE_IMAGE with Python 3, or leave BASE_IMAGE out"
        )
    return ProbeFailed(
        f"a container of base image {image} did not start: {said[:200]}",
        hint="try `docker run --rm --entrypoint python3 IMAGE --version`",
    )


def _missing(said: str) -> bool:
    return "not found" in said or "no such file" in said.lower()


def _of_gpus(image: str, offer: Gpus, said: str) -> UsageError | None:
    """The error where GPUs are to blame, or what puts them into a container."""
    if "unsatisfied condition: cuda" in said:  # NVIDIA's runtime reads NVIDIA_REQUIRE_CUDA of the image
        return DriverTooOld(
            f"the host's driver is too old for base image {image}: {said[said.index('unsatisfied') :][:120]}",
            hint="update the driver, or choose a BASE_IMAGE made for an older CUDA",
        )
    if "nvidia-container-cli" in said:
        why = said[said.index("nvidia-container-cli") :][:200]
        if "unknown device" in why:
            return CdiUnknown(f"the engine has no such GPU: {why}", hint="`nvidia-smi -L` on its host lists them")
        return NoGpu(
            f"NVIDIA's runtime cannot give a container {offer.named or 'its GPUs'}: {why}",
            hint="`nvidia-smi` on the engine's host must work; after an update of the driver, restart that host",
        )
    if offer.access != "none" and _missing(said) and any(words in said for words in _GONE):
        at = min(said.index(words) for words in _GONE if words in said)
        return GpuFilesGone(
            f"the engine cannot give a container {offer.named or 'its GPUs'}: {said[at:][:200]}",
            hint=f"its CDI specification is older than its driver: {_REGENERATE} makes it anew",
        )
    if "CDI" in said:
        return CdiUnknown(
            f"the engine cannot give a container {offer.named}: {said[:200]}",
            hint=f"`docker info` lists its CDI devices, {_REGENERATE} makes them; see GPUS=",
        )
    return None
