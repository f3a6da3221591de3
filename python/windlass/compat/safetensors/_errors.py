"""Errors that are windlass's and the reference library's at once, so that both kinds of ``except`` find them."""

from __future__ import annotations

import os
import sys
from typing import Any

from windlass import errors
from windlass.errors import CheckpointNotFoundError, WindlassError

try:
    from safetensors import SafetensorError
except ImportError:

    class SafetensorError(Exception):  # type: ignore[no-redef]
        """What goes wrong with a safetensors file."""


def _twin(kind: type[WindlassError]) -> type[WindlassError]:
    body = {"__doc__": kind.__doc__, "__module__": __name__}
    return type(kind.__name__, (kind, SafetensorError), body)


_TWINS: dict[type[BaseException], type[WindlassError]] = {
    kind: _twin(kind)
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, WindlassError)
}
# The reference library has no name of its own for a file that is not there.
del _TWINS[CheckpointNotFoundError]
# By their names, so that such errors can be pickled.
vars(sys.modules[__name__]).update({twin.__name__: twin for twin in _TWINS.values()})


class NotCarriedError(_TWINS[errors.OptionError]):  # type: ignore[misc]
    """A framework or a kind of device that the reference library knows and windlass does not."""


def adopt(error: WindlassError) -> WindlassError:
    """Makes an error one of `SafetensorError` too; it keeps its fields and where it came from."""
    twin = _TWINS.get(type(error))
    if twin is not None:
        error.__class__ = twin
    return error


def safetensor_error(
    kind: type[WindlassError], message: str, *, path: str | None = None, tensor: str | None = None
) -> WindlassError:
    """An error of windlass's that is a `SafetensorError` too."""
    return adopt(kind(message, path=path, tensor=tensor))


def file_name(filename: Any) -> str:
    """The path that a file is opened by; text, or what has a path that is text."""
    name = os.fspath(filename)
    if not isinstance(name, str):
        raise TypeError(f"filename cannot be {name!r}: it is text, or a path of text")
    return name


def no_module(framework: str) -> ImportError:
    """The error of importing what is not offered."""
    return ImportError(
        f"windlass has no tensors of {framework}: its frameworks are torch, numpy and jax. "
        f"safetensors.{framework} has them"
    )
