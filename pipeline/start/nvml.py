"""The GPUs that CUDA would show this process, named by NVML through ctypes: no torch, no CUDA context.

NVML sees every GPU of the container. CUDA_VISIBLE_DEVICES narrows and reorders them by index, by UUID or by its
unique beginning, and ends at the first word that names none. A GPU in MIG mode counts as its first slice, since a
CUDA process gets one; a slice may also be named by its own UUID. What NVML calls a device is what
`torch.cuda.get_device_name` says, which FlashInfer records.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_NAME = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
_UUID = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_VERSION = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
_LIBRARY = "libnvidia-ml.so.1"


class NoNvml(Exception):
    """NVML is not there, or does not answer; the message says which."""


class Device:
    """One GPU or MIG slice: its name, its UUID, and whether it is a slice."""

    __slots__ = ("mig", "name", "uuid")

    def __init__(self, name: str, uuid: str, *, mig: bool = False) -> None:
        self.name = name
        self.uuid = uuid
        self.mig = mig


class Gpus:
    """What NVML says: all GPUs in its order (that of the PCI bus), the slices of each, and the driver."""

    __slots__ = ("devices", "driver", "slices")

    def __init__(self, devices: list[Device], slices: list[list[Device]], driver: str) -> None:
        self.devices = devices
        self.slices = slices  # one list per device; empty where MIG is off
        self.driver = driver


def read_gpus(library: str = _LIBRARY) -> Gpus:
    """Ask NVML for all GPUs and slices. Raises `NoNvml`."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise NoNvml(f"{library} is not here") from error
    _call(nvml, "nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        handles = [_handle(nvml, "nvmlDeviceGetHandleByIndex_v2", index) for index in range(count.value)]
        devices = [_device(nvml, handle) for handle in handles]
        slices = [_slices(nvml, handle) for handle in handles]
        driver = ctypes.create_string_buffer(_VERSION)
        _call(nvml, "nvmlSystemGetDriverVersion", driver, ctypes.c_uint(_VERSION))
        return Gpus(devices, slices, driver.value.decode(errors="replace"))
    finally:
        nvml.nvmlShutdown()


def visible(gpus: Gpus, environment: Mapping[str, str]) -> list[Device]:
    """The devices that a CUDA process would see, in its order, by CUDA_VISIBLE_DEVICES; an empty value hides all."""
    shown = [slices[0] if slices else device for device, slices in zip(gpus.devices, gpus.slices, strict=True)]
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return shown
    chosen: list[Device] = []
    for word in asked.split(","):
        device = _named(word.strip(), gpus, shown)
        if device is None:
            break
        if device in chosen:  # CUDA takes a device named twice for an error and shows none
            return []
        chosen.append(device)
    return chosen


def _named(word: str, gpus: Gpus, shown: list[Device]) -> Device | None:
    if word.isdecimal():
        return shown[int(word)] if len(word) < 6 and int(word) < len(shown) else None
    if word.startswith("MIG-"):
        found = [one for slices in gpus.slices for one in slices if one.uuid.startswith(word)]
    elif word.startswith("GPU-"):
        found = [shown[i] for i, one in enumerate(gpus.devices) if one.uuid.startswith(word)]
    else:
        return None
    return found[0] if len(found) == 1 else None


def _call(nvml: ctypes.CDLL, name: str, *arguments: object) -> None:
    try:
        status = getattr(nvml, name)(*arguments)
    except AttributeError as error:
        raise NoNvml(f"this driver's NVML has no {name}") from error
    if status != 0:
        raise NoNvml(f"{name} ended with NVML status {status}")


def _handle(nvml: ctypes.CDLL, name: str, *arguments: object) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call(nvml, name, *arguments, ctypes.byref(handle))
    return handle


def _device(nvml: ctypes.CDLL, handle: ctypes.c_void_p, *, mig: bool = False) -> Device:
    name, uuid = ctypes.create_string_buffer(_NAME), ctypes.create_string_buffer(_UUID)
    _call(nvml, "nvmlDeviceGetName", handle, name, ctypes.c_uint(_NAME))
    _call(nvml, "nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID))
    return Device(name.value.decode(errors="replace"), uuid.value.decode(errors="replace"), mig=mig)


def _slices(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> list[Device]:
    """The MIG slices of a GPU; none where MIG is off or the GPU knows no MIG."""
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    try:
        _call(nvml, "nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        if current.value != 1:
            return []
        _call(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most))
    except NoNvml:
        return []
    found = []
    for index in range(most.value):
        try:
            slice_handle = _handle(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index))
            found.append(_device(nvml, slice_handle, mig=True))
        except NoNvml:  # indices may have gaps
            continue
    return found
