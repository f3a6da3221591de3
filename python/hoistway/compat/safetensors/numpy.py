"""Arrays of numpy, in files and in bytes: what `safetensors.numpy` has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoistway._backing import numpy_shortfall
from hoistway.compat.safetensors._bytes import check_backing, load_bytes, save_bytes, write_file
from hoistway.compat.safetensors._errors import SafetensorError
from hoistway.compat.safetensors._safe_open import safe_open

if TYPE_CHECKING:
    from os import PathLike

    import numpy as np


def load_file(filename: str | PathLike[str], *, backend: str = "mmap") -> dict[str, np.ndarray[Any, Any]]:
    """Loads all arrays of a file; the dictionary says how in its attribute ``report``."""
    with safe_open(filename, framework="np", backend=backend) as file:
        tensors: dict[str, np.ndarray[Any, Any]] = file.get_tensors()
        return tensors


def load(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Loads all arrays from the bytes of a file."""
    return load_bytes(data, "numpy")


def save_file(
    tensor_dict: dict[str, np.ndarray[Any, Any]],
    filename: str | PathLike[str],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes arrays to a file. The name has the old file, whole, until the new one is."""
    write_file(_checked(tensor_dict), filename, metadata)


def save(tensor_dict: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file of these arrays."""
    return save_bytes(_checked(tensor_dict), metadata)


def _checked(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays in the order of bytes and elements that files have them in."""
    import numpy as np  # noqa: PLC0415

    checked = {}
    for name, array in tensors.items():
        if not isinstance(array, np.ndarray):
            # What the reference library fails with, which asks anything for the attributes of an array.
            raise AttributeError(f"array {name!r} is not an array of numpy's but of {type(array)}")
        check_backing({name: array}, numpy_shortfall)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        checked[name] = np.asarray(little, order="C")
    return checked


__all__ = ["SafetensorError", "load", "load_file", "save", "save_file"]
