"""Saving, and loading from bytes, with the errors of the reference library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import hoistway
from hoistway.compat.safetensors._errors import safetensor_error, saved_name, translated
from hoistway.errors import OptionError

if TYPE_CHECKING:
    from os import PathLike

    from hoistway._frameworks import Framework


def load_bytes(data: bytes, framework: Framework) -> dict[str, Any]:
    """All tensors of a file's bytes."""
    if not isinstance(data, bytes):
        raise TypeError(f"argument 'bytes': {type(data).__name__!r} object is not an instance of 'bytes'")
    with translated():
        return hoistway.load(data, framework=framework)


def save_bytes(tensors: Mapping[str, Any], metadata: dict[str, str] | None) -> bytes:
    """The bytes of a file of these tensors."""
    check_text(tensors, metadata)
    with translated():
        return hoistway.save(tensors, metadata=metadata)


def write_file(
    tensors: Mapping[str, Any], filename: str | PathLike[str], metadata: dict[str, str] | None
) -> None:
    """Writes tensors to a file, which takes its name when it is whole and on the drive."""
    path = saved_name(filename)
    check_text(tensors, metadata)
    with translated():
        hoistway.save_file(tensors, path, metadata=metadata)


def check_text(tensors: Mapping[str, Any], metadata: Any) -> None:
    """Fails unless the names of tensors, and names and values of metadata, are text."""
    if metadata is not None and not isinstance(metadata, dict):
        raise TypeError(f"argument 'metadata': {metadata!r} is not an instance of 'dict'")
    texts = [*tensors, *(metadata or {}), *(metadata or {}).values()]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"names of tensors and metadata are text, not {text!r}")


def check_backing(tensors: Mapping[str, Any], shortfall: Callable[[Any], str | None]) -> None:
    """Fails if the memory of a tensor is gone, before anything reads it."""
    for name, tensor in tensors.items():
        if problem := shortfall(tensor):
            raise safetensor_error(OptionError, f"tensor {name!r} cannot be saved: {problem}", tensor=name)
