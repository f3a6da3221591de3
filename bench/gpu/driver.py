"""The CUDA driver by ctypes: what checks and limits need of a device without any framework."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np

PORTABLE = 1
NON_BLOCKING = 1
SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSynchronize": [],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemHostAlloc": [POINTER(c_void_p), c_size_t, c_uint],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamDestroy_v2": [c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


class NoGpuError(Exception):
    """There is no device to use."""


class DriverError(Exception):
    """The driver refused or failed a call."""


class Driver:
    """A device and its primary context, which is the one that frameworks use."""

    def __init__(self, ordinal: int = 0) -> None:
        self._library = _library()
        count = self.device_count()
        if count <= ordinal:
            raise NoGpuError(f"the driver sees {count} devices")
        device = c_int()
        self.call("cuDeviceGet", byref(device), ordinal)
        self._device = device.value
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context = context
        self.enter()

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function of the driver; its name and the error's are in the exception."""
        _checked(self._library, function, *arguments)

    def enter(self) -> None:
        """Makes the context current on this thread."""
        self.call("cuCtxSetCurrent", self._context)

    def device_count(self) -> int:
        """How many devices there are."""
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def name(self) -> str:
        """What the device is called."""
        buffer = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", buffer, len(buffer), self._device)
        return buffer.value.decode()

    def version(self) -> str:
        """The version of CUDA that the driver speaks."""
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def current_context(self) -> int | None:
        """The context that is current on this thread."""
        context = c_void_p()
        self.call("cuCtxGetCurrent", byref(context))
        return context.value

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Waits for everything that the context was given to do."""
        self.call("cuCtxSynchronize")

    def allocate(self, size: int) -> int:
        """Address of new device memory."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Gives device memory back."""
        self.call("cuMemFree_v2", address)

    def pinned(self, size: int) -> np.ndarray:
        """Pinned host memory, as bytes. It lasts as long as the process."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), size, PORTABLE)
        return np.ctypeslib.as_array(ctypes.cast(address, POINTER(ctypes.c_uint8)), (size,))

    def stream(self) -> Stream:
        """A stream of its own, without order with the default one."""
        return Stream(self)


class Stream:
    """Copies in order, until it is synchronized."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        handle = c_void_p()
        driver.call("cuStreamCreate", byref(handle), NON_BLOCKING)
        self.handle = handle.value

    def to_device(self, target: int, source: np.ndarray) -> None:
        """Begins a copy of host memory to the device."""
        self._driver.call(
            "cuMemcpyHtoDAsync_v2", target, source.ctypes.data, source.nbytes, c_void_p(self.handle)
        )

    def to_host(self, target: np.ndarray, source: int) -> None:
        """Begins a copy of device memory to the host."""
        self._driver.call(
            "cuMemcpyDtoHAsync_v2", target.ctypes.data, source, target.nbytes, c_void_p(self.handle)
        )

    def synchronize(self) -> None:
        """Waits for what was begun."""
        self._driver.call("cuStreamSynchronize", c_void_p(self.handle))

    def close(self) -> None:
        """Gives the stream back."""
        self._driver.call("cuStreamDestroy_v2", c_void_p(self.handle))


def _library() -> ctypes.CDLL:
    # The suite passes this name on only when it was told to use the stand-in.
    path = os.environ.get("WINDLASS_CUDA_DRIVER", "libcuda.so.1")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise NoGpuError(f"there is no driver of CUDA: {error}") from error
    for function, arguments in SIGNATURES.items():
        getattr(library, function).argtypes = arguments
    try:
        _checked(library, "cuInit", 0)
    except DriverError as error:
        raise NoGpuError(str(error)) from error
    return library


def _checked(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    code = getattr(library, function)(*arguments)
    if code != 0:
        name = c_char_p()
        library.cuGetErrorName(code, byref(name))
        raise DriverError(f"{function}: {(name.value or b'?').decode()} ({code})")
