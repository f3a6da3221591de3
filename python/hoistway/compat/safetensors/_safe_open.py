"""`safe_open`: one safetensors file, its tensors and slices of these, read when they are asked for."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hoistway._checkpoint import Checkpoint, LoadedTensors
from hoistway.compat.safetensors._ahead import ReadAhead
from hoistway.compat.safetensors._errors import adopt, file_name, safetensor_error, translated
from hoistway.compat.safetensors._index import Cut, is_plain, strict_cut, torch_cut
from hoistway.compat.safetensors._reports import Account
from hoistway.compat.safetensors._target import check_backend, check_device, check_framework, check_place
from hoistway.errors import (
    CheckpointNotFoundError,
    FormatError,
    HoistwayError,
    SliceError,
    StorageError,
    StoragePermissionError,
    TensorNotFoundError,
)

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class safe_open:  # noqa: N801  (the name that is imported)
    """Opens a safetensors file and reads of it what is asked for.

    Args:
        filename: The file.
        framework: Whose tensors to return: ``"pt"``, ``"torch"``, ``"np"``, ``"numpy"``, ``"flax"`` or ``"jax"``.
        device: Where to put them: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a number.
        backend: ``"mmap"`` or ``"pread"``. Both read by the routes of hoistway; they differ in the indices that slices
            of torch's tensors take, as they do in the reference library.
    """

    _options: ClassVar[Mapping[str, Any]] = {}
    _file: _File | None

    def __new__(cls, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> Self:
        self = super().__new__(cls)
        self._file = _File(file_name(filename), framework, device, backend, safe_open._options)
        return self

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._opened.checkpoint.keys())

    def offset_keys(self) -> list[str]:
        """Names of the tensors, in the order of their bytes in the file."""
        return self._opened.checkpoint.keys()

    def metadata(self) -> dict[str, str] | None:
        """The metadata of the file; ``None`` if it has none."""
        metadata = self._opened.checkpoint.metadata()
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor."""
        file = self._opened
        file.check(name)
        return file.load(name, None)

    def get_tensors(self) -> LoadedTensors:
        """Reads all tensors at once, in the order of `offset_keys`."""
        return self._opened.load_all()

    def get_slice(self, name: str) -> PySafeSlice:
        """A tensor that reads what it is indexed with."""
        file = self._opened
        return PySafeSlice(file, name, *file.info(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _exc_type: type[BaseException] | None,
        _exc_value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        # Existing slices go on reading: the file is closed when the last one is dropped.
        self._file = None

    @property
    def _opened(self) -> _File:
        if self._file is None:
            raise safetensor_error(HoistwayError, "File is closed")
        return self._file


class PySafeSlice:
    """A tensor that is read as far as it is indexed."""

    __slots__ = ("_dtype", "_file", "_name", "_shape")

    def __init__(self, file: _File, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._file = file
        self._name = name
        self._dtype = dtype
        self._shape = shape

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Element type by its name in the file."""
        return self._dtype

    def __getitem__(self, index: Any) -> Any:
        file, name, shape = self._file, self._name, self._shape
        if index is Ellipsis:
            return file.load(name, None)
        # Two of these are one element of torch's, which is what indices count.
        pairs = self._dtype == "F4" and file.is_torch and len(shape) > 0
        if pairs:
            shape = (*shape[:-1], shape[-1] // 2)
        if file.indexes_as_torch:
            cut = torch_cut(index, shape)
            if cut is None:
                _refuse_as_torch(index, shape, file.path, name)
                return file.load(name, None)[index]
        else:
            try:
                cut = strict_cut(index, shape, name)
            except HoistwayError as error:
                error.path = file.path
                raise
        if all(read == (0, size) for read, size in zip(cut.ranges, shape, strict=True)):
            return _finished(file.load(name, None), cut)
        if pairs:
            start, stop = cut.ranges[-1]
            cut.ranges[-1] = 2 * start, 2 * stop
        return _finished(file.load(name, cut.ranges), cut)


class _File:
    """An open file, which its slices share."""

    def __init__(
        self, path: str, framework: str, device: Any, backend: str, options: Mapping[str, Any]
    ) -> None:
        own_framework = check_framework(framework)
        own_device = check_device(device)
        own_backend = check_backend(backend)
        self.path = path
        _check_file(path)
        check_place(own_framework, own_device)
        self.is_torch = own_framework == "torch"
        self.indexes_as_torch = self.is_torch and own_backend == "mmap"
        with translated():
            self.checkpoint = Checkpoint(path, framework=own_framework, device=own_device, **options)
        if self.checkpoint._opened.key_values() is not None:
            raise safetensor_error(FormatError, f"{path} is a GGUF file, not one of safetensors", path=path)
        self._account = Account(path)
        self._ahead = ReadAhead(self.checkpoint, self._account.add) if self._may_read_ahead() else None

    def __del__(self) -> None:
        # A file that could not be opened has none. What waits goes first: a handler of the log may raise.
        if (ahead := getattr(self, "_ahead", None)) is not None:
            ahead.close()
        if (account := getattr(self, "_account", None)) is not None:
            account.close()

    def check(self, name: Any) -> None:
        """Whether there is a tensor of this name."""
        if not isinstance(name, str):
            raise TypeError(f"argument 'name': {name!r} is not an instance of 'str'")
        if name not in self.checkpoint:
            message = f"File does not contain tensor {name}"
            raise safetensor_error(TensorNotFoundError, message, path=self.path, tensor=name)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Element type and shape of a tensor."""
        self.check(name)
        dtype, shape, _ = self.checkpoint._info(name)
        return dtype, shape

    def load(self, name: str, ranges: list[tuple[int, int]] | None) -> Any:
        """Loads a tensor, or ranges of its dimensions."""
        if self._ahead is not None and ranges is not None:
            self._ahead.skip(name)
        elif self._ahead is not None:
            with translated():
                if (tensor := self._ahead.take(name)) is not None:
                    converted: dict[str, Any] = {}
                    self.checkpoint._convert([tensor], converted)
                    return converted[name]
        slices = None if ranges is None else {name: ranges}
        return self._load({"select": [name], "slices": slices})[name]

    def load_all(self) -> LoadedTensors:
        """Loads all tensors."""
        return self._load({})

    def _may_read_ahead(self) -> bool:
        """Whether more than the tensors that are asked for may be in memory for a while."""
        options = self.checkpoint._options
        has_budget = options.get("memory_budget") or os.environ.get("HOISTWAY_MEMORY_BUDGET")
        return options["device"] == "cpu" and not has_budget

    def _load(self, request: Mapping[str, Any]) -> LoadedTensors:
        with translated():
            loaded = self.checkpoint._load(request)
        self._account.add(loaded._report)
        return loaded


class _safe_open_handle(safe_open):  # noqa: N801
    """`safe_open` for a file that the caller has open: an object with ``name`` and ``fileno``."""

    def __new__(cls, f: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> Self:
        descriptor, name = f.fileno(), f.name
        try:
            is_same = os.path.samestat(os.stat(name), os.fstat(descriptor))
        except OSError:
            is_same = False
        if not is_same and sys.platform == "win32":
            reason = "the open file has another name by now, or none: Windows reads it by its name only"
            raise FileNotFoundError(errno.ENOENT, reason, name)
        # What was renamed or deleted since is still what the descriptor says.
        path = name if is_same else f"/proc/self/fd/{descriptor}"
        return super().__new__(cls, path, framework, device, backend=backend)


def _check_file(path: str) -> None:
    """Whether there is such a file. hoistway would take directories, patterns and indexes too."""
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError as error:
        raise adopt(
            StoragePermissionError(f"{path}: {error.strerror}", path=path, errno=error.errno)
        ) from None
    except (OSError, ValueError):
        raise CheckpointNotFoundError(f"No such file or directory: {path}", path=path) from None
    if is_directory:
        message = f"{path} is a directory; name one of its files"
        raise adopt(StorageError(message, path=path, errno=errno.EISDIR))
    if path.endswith(".json"):
        raise safetensor_error(FormatError, f"{path} is an index; name one of its files", path=path)


def _refuse_as_torch(index: Any, shape: tuple[int, ...], path: str, tensor: str) -> None:
    """Raises what torch raises for such an index, if that can be told before anything is read."""
    import torch  # noqa: PLC0415

    if not is_plain(index):
        return
    try:
        torch.empty((), dtype=torch.uint8).expand(shape)[index]
    except IndexError as error:
        message = f"tensor {tensor!r} of shape {list(shape)}: {error}"
        raise safetensor_error(SliceError, message, path=path, tensor=tensor) from None


def _finished(tensor: Any, cut: Cut) -> Any:
    """What was asked for, of what was read; alone in its memory."""
    if cut.is_done:
        return tensor
    index = *cut.then, ...
    part = tensor[index]
    if hasattr(part, "contiguous"):
        # What lies in order may still be a small part of what was read, and keep all of it.
        return part.clone() if part.is_contiguous() and part.nbytes < tensor.nbytes else part.contiguous()
    flags = getattr(part, "flags", None)
    if flags is None:
        return part
    return part if flags.c_contiguous and part.nbytes == tensor.nbytes else part.copy()


__all__ = ["PySafeSlice", "_safe_open_handle", "safe_open"]
