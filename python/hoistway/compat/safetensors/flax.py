"""Arrays of jax, in files and in bytes: what `safetensors.flax` has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoistway.compat.safetensors import numpy
from hoistway.compat.safetensors._bytes import load_bytes
from hoistway.compat.safetensors._errors import SafetensorError
from hoistway.compat.safetensors._safe_open import safe_open

if TYPE_CHECKING:
    from os import PathLike

    from jax import Array


def load_file(filename: str | PathLike[str], *, backend: str = "mmap") -> dict[str, Array]:
    """Loads all arrays of a file; the dictionary says how in its attribute ``report``."""
    with safe_open(filename, framework="flax", backend=backend) as file:
        tensors: dict[str, Array] = file.get_tensors()
        return tensors


def load(data: bytes) -> dict[str, Array]:
    """Loads all arrays from the bytes of a file."""
    return load_bytes(data, "jax")


def save_file(
    tensors: dict[str, Array], filename: str | PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Writes arrays to a file. The name has the old file, whole, until the new one is."""
    import numpy as np  # noqa: PLC0415

    numpy.save_file({name: np.asarray(array) for name, array in tensors.items()}, filename, metadata)


def save(tensors: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file of these arrays."""
    import numpy as np  # noqa: PLC0415

    return numpy.save({name: np.asarray(array) for name, array in tensors.items()}, metadata)


__all__ = ["SafetensorError", "load", "load_file", "save", "save_file"]
