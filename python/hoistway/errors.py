"""Errors, sorted by what the caller can do about them.

Each exception is also the built-in one that a caller would expect, so ``except OSError`` and the like work.
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
    """Nothing to load at this path."""


class FormatError(HoistwayError, ValueError):
    """A file is not what its format allows."""


class TruncatedError(FormatError):
    """A file ends before a tensor does."""


class FileChangedError(HoistwayError, OSError):
    """A file was rewritten since its header was read. New permissions look like that too: they move its change time."""


class StorageError(HoistwayError, OSError):
    """The operating system refused or failed an operation; ``errno`` says which error it gave."""

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
    """The operating system or a store does not let this process read or write the file."""


class RouteUnavailableError(HoistwayError, RuntimeError):
    """The route that was named cannot carry the data."""


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
    """The device that was named, ``device``, is not there or cannot be used."""


class DeviceError(_BaseDeviceError):
    """A device, ``device``, failed an operation. Tensors on it may be lost."""


class TensorNotFoundError(HoistwayError, KeyError):
    """No tensor has this name, or no name matches the pattern."""


class ExpertNotFoundError(HoistwayError, IndexError):
    """The layer has no experts, or fewer than that."""


class SliceError(HoistwayError, IndexError):
    """A slice does not fit its tensor, or a table has no such row."""


class ArgumentError(HoistwayError, TypeError):
    """An argument is not of a type that the call takes."""


# What ImportError calls `path` is no path-like object, and is never set here.
class MissingPackageError(HoistwayError, ImportError):  # type: ignore[misc]
    """A package that the call needs is not installed."""


class ClosedError(HoistwayError, ValueError):
    """A checkpoint, reader, stream or lease was used after it was closed or released."""


class OptionError(HoistwayError, ValueError):
    """An option has a value that means nothing."""


class UnknownOptionError(OptionError, TypeError):
    """There is no option of this name."""


class TargetError(HoistwayError, ValueError):
    """A target of ``copy_into`` cannot take its tensor: another type, shape or layout, or memory that is read-only."""


class UnsupportedDtypeError(HoistwayError, TypeError):
    """The framework has no type for a tensor's elements, or they cannot be converted."""


class MemoryBudgetError(HoistwayError, MemoryError):
    """The load would need more memory than it may have. Of experts and layers: the budget is too small for what was
    asked, or leases hold the room that it needs.
    """


class DigestMismatchError(HoistwayError, ValueError):
    """A tensor's bytes are not those that were expected."""


class CancelledError(HoistwayError):
    """The load was cancelled."""


class ForkedError(HoistwayError, RuntimeError):
    """The load was started, or the store was opened, before this process was forked off."""


class RequestError(HoistwayError, ValueError):
    """A request to a KV store makes no sense: a key that no block can have, or memory that does not fit."""


class StoreNotFoundError(HoistwayError, FileNotFoundError):
    """There is no KV store at this path, or what is there is none."""


class StoreClosedError(HoistwayError, RuntimeError):
    """The KV store was closed, or the store of experts closed itself because its policy failed."""


class StoreReadOnlyError(HoistwayError, PermissionError):
    """The KV store was opened for reading only."""


class MemoryLostError(HoistwayError, RuntimeError):
    """A ring or a device failed while it had the memory of a request to a KV store. The memory must not be used again:
    it may be read or written until the process ends.
    """


class WaitTimeoutError(HoistwayError, TimeoutError):
    """A wait took longer than its timeout. The work goes on, except reads of experts for a lease, which end."""


class DistributedError(HoistwayError, RuntimeError):
    """Ranks disagree, a rank failed, or one ended or did not answer in time. Every rank gets it."""

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
        """The class name of its error."""
