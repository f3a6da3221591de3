"""Errors that are hoistway's and the reference library's at once, so that both kinds of ``except`` find them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from hoistway import errors
from hoistway._arguments import is_url

if TYPE_CHECKING:
    from types import TracebackType

try:
    from safetensors import SafetensorError
except ImportError:

    class SafetensorError(Exception):  # type: ignore[no-redef]
        """What goes wrong with a safetensors file."""


def _twin(kind: type[errors.HoistwayError]) -> type[errors.HoistwayError]:
    body = {"__doc__": kind.__doc__, "__module__": __name__}
    return type(kind.__name__, (kind, SafetensorError), body)


_TWINS: dict[type[BaseException], type[errors.HoistwayError]] = {
    kind: _twin(kind)
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.HoistwayError)
}
# The reference library has no name of its own for a file that is not there.
del _TWINS[errors.CheckpointNotFoundError]
# By their names, so that such errors can be pickled; this module says `errors.` for those of hoistway.
vars(sys.modules[__name__]).update({twin.__name__: twin for twin in _TWINS.values()})


class NotCarriedError(errors.OptionError, SafetensorError):
    """A framework or a kind of device that the reference library knows and hoistway does not."""


def adopt(error: errors.HoistwayError) -> errors.HoistwayError:
    """The same error, with its fields, as one of `SafetensorError` too."""
    twin = _TWINS.get(type(error))
    if twin is None:
        return error
    adopted = twin(str(error))
    vars(adopted).update(vars(error))
    if isinstance(error, OSError) and isinstance(adopted, OSError):
        adopted.errno = error.errno
    return adopted


class translated:  # noqa: N801  (a block, as those of contextlib)
    """Makes errors of hoistway's in the block those of the reference library too.

    No generator, as it is entered for each tensor.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, errors.HoistwayError):
            raise adopt(error) from None


def safetensor_error(
    kind: type[errors.HoistwayError], message: str, *, path: str | None = None, tensor: str | None = None
) -> errors.HoistwayError:
    """An error of hoistway's that is a `SafetensorError` too."""
    return adopt(kind(message, path=path, tensor=tensor))


def file_name(filename: Any) -> str:
    """The path that a file is opened by; text, or what has a path that is text."""
    name = os.fspath(filename)
    if not isinstance(name, str):
        raise TypeError(f"filename cannot be {name!r}: it must be text, or a path of text")
    return name


def saved_name(filename: Any) -> str:
    """The path that a file is saved by, which is no URL: what saves to a store has options of its own."""
    name = file_name(filename)
    if is_url(name):
        raise safetensor_error(
            errors.OptionError,
            "filename cannot be a URL: this module saves to paths; use hoistway.save_file, which saves to s3:// and gs://",
        )
    return name


def no_module(framework: str) -> ImportError:
    """The error of importing what is not offered."""
    return ImportError(
        f"hoistway.compat.safetensors has no module for {framework}, only for torch, numpy and flax: "
        f"use safetensors.{framework}"
    )


__all__ = [
    "NotCarriedError",
    "SafetensorError",
    "adopt",
    "file_name",
    "no_module",
    "safetensor_error",
    "saved_name",
    "translated",
]
