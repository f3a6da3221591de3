"""The driver of the machine's devices by ctypes: what checks and limits need of a device without any framework."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

PORTABLE = 1
NON_BLOCKING = 1
SIGNATURES: dict[str, list[Any]] = {
    "init": [c_uint],
    "version": [POINTER(c_int)],
    "count": [POINTER(c_int)],
    "device": [POINTER(c_int), c_int],
    "name": [c_char_p, c_int, c_int],
    "synchronize": [],
    "memory": [POINTER(c_size_t), POINTER(c_size_t)],
    "allocate": [POINTER(c_uint64), c_size_t],
    "free": [c_uint64],
    "allocate_host": [POINTER(c_void_p), c_size_t, c_uint],
    "to_device": [c_uint64, c_void_p, c_size_t, c_void_p],
    "to_host": [c_void_p, c_uint64, c_size_t, c_void_p],
    "create_stream": [POINTER(c_void_p), c_uint],
    "wait_for_stream": [c_void_p],
    "destroy_stream": [c_void_p],
    "error_name": [c_int, POINTER(c_char_p)],
}
"""What the drivers of all vendors have."""


@dataclass(frozen=True, eq=False)
class Vendor:
    """Whose driver it is, and what that calls its functions."""

    title: str
    kind: str
    """Of its devices, as hoistway names it."""
    dlpack: int
    variable: str
    """The environment variable that names a stand-in of its library."""
    library: str
    symbols: dict[str, str]
    own: dict[str, list[Any]]
    """Functions that only it has."""

    def version_text(self, version: int) -> str:
        """Such as 12.8."""
        major, minor = (10_000_000, 100_000) if self.kind == "rocm" else (1000, 10)
        return f"{version // major}.{version % major // minor}"


VENDORS = (
    Vendor(
        "CUDA",
        "cuda",
        2,
        "HOISTWAY_CUDA_DRIVER",
        "libcuda.so.1",
        {
            "init": "cuInit",
            "version": "cuDriverGetVersion",
            "count": "cuDeviceGetCount",
            "device": "cuDeviceGet",
            "name": "cuDeviceGetName",
            "synchronize": "cuCtxSynchronize",
            "memory": "cuMemGetInfo_v2",
            "allocate": "cuMemAlloc_v2",
            "free": "cuMemFree_v2",
            "allocate_host": "cuMemHostAlloc",
            "to_device": "cuMemcpyHtoDAsync_v2",
            "to_host": "cuMemcpyDtoHAsync_v2",
            "create_stream": "cuStreamCreate",
            "wait_for_stream": "cuStreamSynchronize",
            "destroy_stream": "cuStreamDestroy_v2",
            "error_name": "cuGetErrorName",
        },
        {
            "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
            "cuCtxSetCurrent": [c_void_p],
            "cuCtxGetCurrent": [POINTER(c_void_p)],
        },
    ),
    Vendor(
        "ROCm",
        "rocm",
        10,
        "HOISTWAY_HIP_DRIVER",
        "libamdhip64.so",
        {
            "init": "hipInit",
            "version": "hipRuntimeGetVersion",
            "count": "hipGetDeviceCount",
            "device": "hipDeviceGet",
            "name": "hipDeviceGetName",
            "synchronize": "hipDeviceSynchronize",
            "memory": "hipMemGetInfo",
            "allocate": "hipMalloc",
            "free": "hipFree",
            "allocate_host": "hipHostMalloc",
            "to_device": "hipMemcpyHtoDAsync",
            "to_host": "hipMemcpyDtoHAsync",
            "create_stream": "hipStreamCreateWithFlags",
            "wait_for_stream": "hipStreamSynchronize",
            "destroy_stream": "hipStreamDestroy",
            "error_name": "hipDrvGetErrorName",
        },
        {"hipSetDevice": [c_int], "hipGetDevice": [POINTER(c_int)]},
    ),
)


class NoGpuError(Exception):
    """There is no device to use."""


class DriverError(Exception):
    """The driver refused or failed a call."""


@cache
def vendor() -> Vendor:
    """The first vendor whose driver shows a device; the first of all if there is none."""
    named = [each for each in VENDORS if each.variable in os.environ]
    for each in named or VENDORS:
        try:
            library = _library(each)
            count = c_int()
            _checked(library, each, "count", byref(count))
        except (NoGpuError, DriverError):
            continue
        if count.value > 0:
            return each
    return (named or VENDORS)[0]


def device(ordinal: int = 0) -> str:
    """The device of this number, as hoistway names it."""
    return f"{vendor().kind}:{ordinal}"


class Driver:
    """A device and its context, which is the one that frameworks use."""

    def __init__(self, ordinal: int = 0) -> None:
        self.vendor = vendor()
        self._library = _library(self.vendor)
        count = self.device_count()
        if count <= ordinal:
            raise NoGpuError(f"the driver sees {count} devices")
        device = c_int()
        self.call("device", byref(device), ordinal)
        self._device = device.value
        self._context = c_void_p()
        if self.vendor.kind == "cuda":
            self.call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self.enter()

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function of the driver; its name and the error's are in the exception."""
        _checked(self._library, self.vendor, function, *arguments)

    def enter(self) -> None:
        """Makes the device current on this thread."""
        if self.vendor.kind == "cuda":
            self.call("cuCtxSetCurrent", self._context)
        else:
            self.call("hipSetDevice", self._device)

    def calls_of(self, symbol: str) -> int | None:
        """How often this function of the driver was called, if it counts calls, as the stand-in does."""
        try:
            count = self._library.fake_cuda_count
        except AttributeError:
            return None
        count.restype = c_uint64
        return int(count(f"calls.{symbol}".encode()))

    def device_count(self) -> int:
        """How many devices there are."""
        count = c_int()
        self.call("count", byref(count))
        return count.value

    def name(self) -> str:
        """What the device is called."""
        buffer = ctypes.create_string_buffer(256)
        self.call("name", buffer, len(buffer), self._device)
        return buffer.value.decode()

    def version(self) -> str:
        """The version of the vendor's software that the driver speaks."""
        version = c_int()
        self.call("version", byref(version))
        return self.vendor.version_text(version.value)

    def current_context(self) -> int | None:
        """The context, or where there is none the device, that is current on this thread."""
        if self.vendor.kind == "cuda":
            context = c_void_p()
            self.call("cuCtxGetCurrent", byref(context))
            return context.value
        current = c_int()
        self.call("hipGetDevice", byref(current))
        return current.value

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""
        free, total = c_size_t(), c_size_t()
        self.call("memory", byref(free), byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Waits for everything that the context was given to do."""
        self.call("synchronize")

    def allocate(self, size: int) -> int:
        """Address of new device memory."""
        address = c_uint64()
        self.call("allocate", byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Gives device memory back."""
        self.call("free", address)

    def pinned(self, size: int) -> np.ndarray:
        """Pinned host memory, as bytes. It lasts as long as the process."""
        address = c_void_p()
        self.call("allocate_host", byref(address), size, PORTABLE)
        return np.ctypeslib.as_array(ctypes.cast(address, POINTER(ctypes.c_uint8)), (size,))

    def stream(self) -> Stream:
        """A stream of its own, without order with the default one."""
        return Stream(self)


class Stream:
    """Copies in order, until it is synchronized."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        handle = c_void_p()
        driver.call("create_stream", byref(handle), NON_BLOCKING)
        self.handle = handle.value

    def to_device(self, target: int, source: np.ndarray) -> None:
        """Begins a copy of host memory to the device."""
        self._driver.call("to_device", target, source.ctypes.data, source.nbytes, c_void_p(self.handle))

    def to_host(self, target: np.ndarray, source: int) -> None:
        """Begins a copy of device memory to the host."""
        self._driver.call("to_host", target.ctypes.data, source, target.nbytes, c_void_p(self.handle))

    def synchronize(self) -> None:
        """Waits for what was begun."""
        self._driver.call("wait_for_stream", c_void_p(self.handle))

    def close(self) -> None:
        """Gives the stream back."""
        self._driver.call("destroy_stream", c_void_p(self.handle))


@cache
def _library(of: Vendor) -> ctypes.CDLL:
    # The suite passes this name on only when it was told to use the stand-in.
    path = os.environ.get(of.variable, of.library)
    try:
        library = ctypes.CDLL(path)
        for function, arguments in SIGNATURES.items():
            getattr(library, of.symbols[function]).argtypes = arguments
        for symbol, arguments in of.own.items():
            getattr(library, symbol).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise NoGpuError(f"there is no driver of {of.title}: {error}") from error
    try:
        _checked(library, of, "init", 0)
    except DriverError as error:
        raise NoGpuError(str(error)) from error
    return library


def _checked(library: ctypes.CDLL, of: Vendor, function: str, *arguments: Any) -> None:
    symbol = of.symbols.get(function, function)
    code = getattr(library, symbol)(*arguments)
    if code != 0:
        name = c_char_p()
        getattr(library, of.symbols["error_name"])(code, byref(name))
        raise DriverError(f"{symbol}: {(name.value or b'?').decode()} ({code})")
