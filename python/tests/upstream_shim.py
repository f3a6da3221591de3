"""A pytest plugin that puts windlass in the place of the reference library's loading functions.

Used by test_upstream.py to run the reference library's own tests. Error messages are not translated.
"""

from __future__ import annotations

import os
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch
import windlass
from safetensors import SafetensorError
from windlass.errors import SliceError, WindlassError


class SafeOpen:
    """windlass's checkpoint behind the interface of ``safe_open``."""

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> None:
        if backend not in ("mmap", "pread"):
            raise SafetensorError(f"backend {backend!r} is invalid")
        try:
            self._checkpoint = windlass.open(os.fspath(filename), framework=framework, device=str(device))
        except FileNotFoundError:
            raise
        except WindlassError as error:
            raise SafetensorError(str(error)) from error

    def keys(self) -> list[str]:
        try:
            return sorted(self._checkpoint.keys())
        except ValueError as error:
            raise SafetensorError(str(error)) from error

    def metadata(self) -> dict[str, str] | None:
        return self._checkpoint.metadata()

    def get_tensor(self, name: str) -> Any:
        return self._checkpoint.get_tensor(name)

    def get_tensors(self) -> dict[str, Any]:
        return dict(self._checkpoint.load())

    def get_slice(self, name: str) -> Any:
        return Slice(self._checkpoint.get_slice(name))

    def __enter__(self) -> SafeOpen:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoint.close()


class Slice:
    """A slice whose errors are those of the reference library."""

    def __init__(self, part: windlass.TensorSlice) -> None:
        self._part = part
        self.get_shape = part.get_shape
        self.get_dtype = part.get_dtype

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._part[index]
        except SliceError as error:
            raise SafetensorError(str(error)) from error


def load_file_torch(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> dict[str, Any]:
    with SafeOpen(filename, "pt", device, backend=backend) as file:
        return file.get_tensors()


def load_file_numpy(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
    with SafeOpen(filename, "np", backend=backend) as file:
        return file.get_tensors()


# load_model and load_file of the modules find `safe_open` and `load_file` in their own namespaces.
for module in (safetensors, safetensors.torch, safetensors.numpy):
    module.safe_open = SafeOpen  # type: ignore[attr-defined]
safetensors.torch.load_file = load_file_torch
safetensors.numpy.load_file = load_file_numpy
