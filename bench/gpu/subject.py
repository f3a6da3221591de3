"""What the checks share: a device, a folder for files, loads into it, and the comparison with what files hold."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hoistway
import numpy as np

from gpu import files
from gpu.driver import Driver, device, vendor

DEVICE = device()
# Whatever the vendor, torch calls its devices so.
TORCH_DEVICE = "cuda:0"
# What direct transfers come in.
BLOCK = 4096
# By their names in safetensors; torch's own names of those that it has.
TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


class SkipError(Exception):
    """A check that cannot be made here, and why."""


Check = Callable[["Subject"], str | None]
"""Fails by an exception. What it returns is worth noting."""


class DeviceBytes:
    """Bytes of the device that belong to a check, as other libraries show theirs."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver, self.size = driver, size
        self._allocated = driver.allocate(size + BLOCK)
        # Where direct transfers can begin.
        self.address = -(-self._allocated // BLOCK) * BLOCK

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Where they are."""
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        """Which device they are on: the first."""
        return (vendor().dlpack, 0)

    def write(self, data: bytes) -> None:
        """Fills them."""
        stream = self._driver.stream()
        stream.to_device(self.address, np.frombuffer(data, np.uint8))
        stream.synchronize()
        stream.close()

    def tobytes(self) -> bytes:
        """Brings them to the host."""
        host = np.empty(self.size, np.uint8)
        stream = self._driver.stream()
        stream.to_host(host, self.address)
        stream.synchronize()
        stream.close()
        return host.tobytes()

    def free(self) -> None:
        """Gives the memory back."""
        self._driver.free(self._allocated)


class Subject:
    """The device that loads go to, through torch where torch can use it."""

    def __init__(self, folder: Path, has_torch: bool) -> None:
        self.folder = folder
        self.torch: Any = None
        if has_torch:
            self.torch = importlib.import_module("torch")
            self.torch.zeros(1, device=TORCH_DEVICE)
        self.driver = Driver()

    def need_torch(self) -> Any:
        """Torch, without which this check makes no sense."""
        if self.torch is None:
            raise SkipError("torch cannot use the device")
        return self.torch

    @property
    def framework(self) -> str:
        """Whose tensors loads return."""
        return "raw" if self.torch is None else "torch"

    def device_bytes(self, size: int, seed: int | None = None) -> DeviceBytes:
        """Memory of the device: random bytes where there is a seed, else 0xA5."""
        memory = DeviceBytes(self.driver, size)
        random = None if seed is None else np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        memory.write(b"\xa5" * size if random is None else random.tobytes())
        return memory

    def load(self, path: Path | list[Path], device: str = DEVICE, **options: Any) -> hoistway.LoadedTensors:
        """A load to the device, of torch's tensors if there is torch."""
        return hoistway.load_file(path, device, **{"framework": self.framework, **options})

    def load_by(self, route: str, path: Path, **options: Any) -> hoistway.LoadedTensors:
        """A load by a named route; where that is refused, so is the check."""
        try:
            return self.load(path, route=route, **options)
        except hoistway.errors.RouteUnavailableError as error:
            raise SkipError(str(error)) from error

    def must_hold(self, tensors: Mapping[str, Any], path: Path) -> None:
        """Checks that tensors are those of a file: names, shapes, types and bytes, also as safetensors reads them."""
        stored = files.read(path)
        assert sorted(tensors) == sorted(stored), f"names: {sorted(tensors)} are not {sorted(stored)}"
        for name, wanted in stored.items():
            self.must_equal(tensors[name], wanted, name)
        if self.torch is not None:
            self._must_match_reference(tensors, path)

    def must_equal(self, tensor: Any, wanted: files.Stored, name: str) -> None:
        """Checks a tensor's type, shape and bytes."""
        shape, dtype = list(wanted.shape), wanted.dtype
        if self.torch is not None and not isinstance(tensor, hoistway.Tensor):
            dtype = f"torch.{TORCH_NAMES[dtype]}"
            if wanted.dtype == "F4":
                shape[-1] //= 2  # Pairs.
        assert str(tensor.dtype) == dtype, f"{name}: type {tensor.dtype} is not {dtype}"
        assert list(tensor.shape) == shape, f"{name}: shape {list(tensor.shape)} is not {shape}"
        same_bytes(self.bytes_of(tensor), wanted.data, name)

    def bytes_of(self, tensor: Any) -> bytes:
        """A tensor's bytes, brought back to the host."""
        if isinstance(tensor, hoistway.Tensor):
            return tensor.tobytes()
        if tensor.numel() == 0:
            return b""
        return tensor.contiguous().reshape(-1).view(self.torch.uint8).cpu().numpy().tobytes()

    def _must_match_reference(self, tensors: Mapping[str, Any], path: Path) -> None:
        try:
            reference = importlib.import_module("safetensors.torch").load_file(path)
        except ImportError:
            return
        except Exception as error:
            # The reference does not know each type that the format has by now; the bytes were compared already.
            if "dtype" in str(error).lower():
                return
            raise
        for name, wanted in reference.items():
            tensor = tensors[name]
            assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), (
                f"{name}: not as in safetensors"
            )
            same_bytes(self.bytes_of(tensor), self.bytes_of(wanted), name)

    def free_bytes(self) -> int:
        """Free bytes of device memory."""
        self.driver.synchronize()
        if self.torch is not None:
            self.torch.cuda.empty_cache()
        return self.driver.memory()[0]


def same_bytes(found: bytes, wanted: bytes, name: str) -> None:
    """Checks bytes, and says where they differ."""
    if found == wanted:
        return
    assert len(found) == len(wanted), f"{name}: {len(found)} bytes are not {len(wanted)}"
    differ = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8))
    raise AssertionError(
        f"{name}: {len(differ)} of {len(wanted)} bytes differ, the first is byte {differ[0]}"
    )


def carriers(tensors: hoistway.LoadedTensors) -> str:
    """Which ways the bytes of a load took."""
    ways = tensors.report.carriers
    return ", ".join(f"{way.route} {way.access}{' via ' + way.via if way.via else ''}" for way in ways)


def must_raise(kind: type[Exception], action: Callable[[], object]) -> Exception:
    """Checks that something raises the error that it should."""
    try:
        action()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead of {kind.__name__}: {error}") from error
    raise AssertionError(f"no error instead of {kind.__name__}")


def on_threads(*actions: Callable[[], object]) -> None:
    """Runs all at once, and raises what one of them raised."""
    thrown: list[Exception] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            thrown.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if thrown:
        raise thrown[0]
