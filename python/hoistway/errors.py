"""Exceptions, one class for each thing that a caller can do about an error.

Each exception also derives from the built-in one that a caller would expect, so that ``except OSError`` works.
"""

from __future__ import annotations

from os import PathLike


class HoistwayError(Exception):
    """Base of all exceptions of hoistway."""

    path: str | PathLike[str] | None
    """The file, if there is one."""
    tensor: str | None
    """The tensor, if there is one."""
    offset: int | None
    """The first byte of the file that is missing or could not be read, if that is known."""

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor
        self.offset = offset

    def __str__(self) -> str:
        """The message as it is, also where a built-in base would quote it."""
        return str(self.args[0])


class CheckpointNotFoundError(HoistwayError, FileNotFoundError):
    """There is nothing to load at this path."""


class FormatError(HoistwayError, ValueError):
    """A file violates its format."""


class TruncatedError(FormatError):
    """A file ends before a tensor does."""


class FileChangedError(HoistwayError, OSError):
    """A file has changed since its header was read. New permissions count too: they update its change time."""


class StorageError(HoistwayError, OSError):
    """An operation of the operating system failed, with the error number ``errno``."""

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, tensor=tensor, offset=offset)
        self.errno = errno


class StoragePermissionError(StorageError, PermissionError):
    """The operating system or an object store denies this process access to the file."""


class RouteUnavailableError(HoistwayError, RuntimeError):
    """The named route cannot carry the data."""


class _BaseDeviceError(HoistwayError, RuntimeError):
    """Something is wrong with a device."""

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(message, path=path, tensor=tensor, offset=offset)
        self.device = device


class DeviceUnavailableError(_BaseDeviceError):
    """The named device, ``device``, does not exist or cannot be used."""


class DeviceError(_BaseDeviceError):
    """A device, ``device``, failed an operation. Tensors on it may be lost."""


class TensorNotFoundError(HoistwayError, KeyError):
    """No tensor has this name, or no name matches the pattern."""


class ExpertNotFoundError(HoistwayError, IndexError):
    """The layer has no experts, or no expert of that number."""


class SliceError(HoistwayError, IndexError):
    """A slice does not fit its tensor, or a table has no such row."""


class ArgumentError(HoistwayError, TypeError):
    """An argument has a type that the call does not accept."""


# What ImportError calls `path` is no path-like object, and is never set here.
class MissingPackageError(HoistwayError, ImportError):  # type: ignore[misc]
    """A package that the call needs is not installed."""


class ClosedError(HoistwayError, ValueError):
    """A checkpoint, reader, stream or lease was used after it was closed or released."""


class OptionError(HoistwayError, ValueError):
    """An option has an invalid value."""


class UnknownOptionError(OptionError, TypeError):
    """There is no option of this name."""


class TargetError(HoistwayError, ValueError):
    """A target of ``copy_into`` cannot hold its tensor: its type, shape or layout differs, or it is read-only."""


class UnsupportedDtypeError(HoistwayError, TypeError):
    """The framework has no type for a tensor's elements, or they cannot be converted."""


class MemoryBudgetError(HoistwayError, MemoryError):
    """The load needs more memory than it may use. For experts and layers: the budget is too small for the request, or
    leases hold the memory that it needs.
    """


class DigestMismatchError(HoistwayError, ValueError):
    """The bytes of a tensor differ from the expected digest, or those of an object from the checksum of its store."""


class CancelledError(HoistwayError):
    """The load was cancelled."""


class ForkedError(HoistwayError, RuntimeError):
    """The load was started, or the store was opened, in the parent before ``fork``."""


class RequestError(HoistwayError, ValueError):
    """A request to a KV store is invalid: a key that no block can have, or memory of the wrong size."""


class StoreNotFoundError(HoistwayError, FileNotFoundError):
    """There is no KV store at this path."""


class StoreClosedError(HoistwayError, RuntimeError):
    """The KV store was closed, or the store of experts closed itself because its policy failed."""


class StoreReadOnlyError(HoistwayError, PermissionError):
    """The KV store was opened for reading only."""


class MemoryLostError(HoistwayError, RuntimeError):
    """A ring or a device failed while it used the memory of a request to a KV store. Do not use the memory again: it
    may be read or written until the process ends.
    """


class WaitTimeoutError(HoistwayError, TimeoutError):
    """A wait exceeded its timeout. The work goes on, except for reads of experts for a lease, which are cancelled."""


class DistributedError(HoistwayError, RuntimeError):
    """Ranks disagree, or a rank failed, ended, or did not answer in time. Every rank raises it."""

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        rank: int | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message, path=path, tensor=tensor, offset=offset)
        self.rank = rank
        """The rank that failed or was lost, if that is known."""
        self.kind = kind
        """The class name of the error of that rank."""
