"""Loading: `load_file` for all at once, `open` for one tensor, a slice, or one after the other."""

from __future__ import annotations

import importlib.util
import json
import operator
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

from windlass import _native
from windlass._frameworks import (
    Converter,
    Framework,
    check_framework,
    converter,
    device_name,
    is_torch,
    torch_allocator,
)
from windlass._metadata import read_only
from windlass._options import LoadOptions
from windlass._report import Report
from windlass.errors import OptionError, SliceError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from windlass._native import Tensor

PathType = str | os.PathLike[str]
Progress = Callable[[int, int], object] | bool
Select = str | Iterable[str] | Callable[[str], bool]


class LoadedTensors(dict[str, Any]):
    """Tensors by name, and the report of how they were loaded."""

    def __init__(self, report: _native.Report) -> None:
        super().__init__()
        self._report = report

    @property
    def report(self) -> Report:
        """What the load did."""
        return Report._from_native(self._report)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain: the report is about this very load. Ordered dictionaries, because those
        are what `torch.load` takes for weights.
        """
        return OrderedDict, (), None, None, iter(self.items())


def load_file(
    path: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Framework = "torch",
    select: Select | None = None,
    exclude: str | Iterable[str] | None = None,
    slices: Mapping[str, Any] | None = None,
    progress: Progress = False,
    pool: _native.MemoryPool | None = None,
    allocator: Literal["driver", "torch"] = "driver",
    lenient: bool | None = None,
    offset: int | None = None,
    **options: Unpack[LoadOptions],
) -> LoadedTensors:
    """Loads a checkpoint into memory.

    Args:
        path: A safetensors or GGUF file, an index, a directory, a glob pattern, or a list of these.
        device: Where to put the tensors: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a number, or a device of torch's.
            Default: ``WINDLASS_DEVICE``, else ``"cpu"``.
        framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, or ``"raw"``, windlass's own.
        select: Names or glob patterns of the tensors to load, or a predicate on names. Default: all.
        exclude: Names or glob patterns of tensors to leave out.
        slices: For some tensors the part to load, as one would index them.
        progress: Called with bytes done and bytes in all; ``True`` for a bar by tqdm.
        pool: Host memory, touched before, to load into.
        allocator: Whose memory of the device to load into: the ``"driver"``'s, or that of ``"torch"``'s allocator.
        lenient: Whether to take GGUF files that break the specification where no harm comes of it. Default:
            ``WINDLASS_LENIENT``, else not.
        offset: Byte at which the GGUF begins in each file, where it is embedded in another. Default: 0, the start of
            the file.
        options: Those of ``windlass load``; see `LoadOptions`.

    Returns:
        A dictionary of tensors, with the report of the load as its attribute ``report``. Quantised tensors of GGUF
        files are ``uint8``: their last dimension counts the bytes of its blocks.
    """
    with Checkpoint(
        path, device=device, framework=framework, allocator=allocator, lenient=lenient, offset=offset
    ) as checkpoint:
        return checkpoint.load(
            select=select, exclude=exclude, slices=slices, progress=progress, pool=pool, **options
        )


class Checkpoint:
    """An open checkpoint. Tensors loaded from it stay valid after it is closed.

    Iterating it gives ``(name, tensor)`` in the order in which tensors become complete.

    Args:
        paths: A safetensors or GGUF file, an index, a directory, a glob pattern, or a list of these. One file of a
            split GGUF model stands for all.
        device: Where to put tensors: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a number, or a device of torch's.
        framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, or ``"raw"``.
        pool: Host memory, touched before, that all loads go into unless they name another.
        allocator: Whose memory of the device to load into: the ``"driver"``'s, or that of ``"torch"``'s allocator.
        lenient: Whether to take GGUF files that break the specification where no harm comes of it. Default:
            ``WINDLASS_LENIENT``, else not.
        offset: Byte at which the GGUF begins in each file, where it is embedded in another. Default: 0, the start of
            the file.
        options: Options of all loads; see `LoadOptions`. A load's own win.
    """

    def __init__(
        self,
        paths: PathType | Sequence[PathType],
        *,
        device: Any = None,
        framework: Framework = "torch",
        pool: _native.MemoryPool | None = None,
        allocator: Literal["driver", "torch"] = "driver",
        lenient: bool | None = None,
        offset: int | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        chosen = os.environ.get("WINDLASS_DEVICE", "cpu") if device is None else device
        name = device_name(chosen, framework)
        check_framework(framework, name)
        self._framework = framework, name
        self._is_torch = is_torch(framework)
        self._options: dict[str, Any] = {"device": name, "pool": pool, **options}
        if allocator == "torch" and name == "cpu":
            raise OptionError(
                "allocator cannot be 'torch': it gives memory of a device, and the device is 'cpu'"
            )
        if allocator == "torch":
            self._options["allocator"] = torch_allocator(name)
        elif allocator != "driver":
            raise OptionError(f"allocator cannot be {allocator!r}: it is one of driver, torch")
        if name != "cpu":
            _find_cufile()
        self._options["usrbio_directories"] = _usrbio_directories()
        _check_names(options)
        if offset is not None and not 0 <= offset < 1 << 64:
            raise OptionError(f"offset cannot be {offset}: it is a number of bytes")
        _native.check_options(**self._options)
        listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self._native: _native.Checkpoint | None = _native.Checkpoint(
            [os.fspath(path) for path in listed], lenient=lenient, offset=offset or 0
        )
        self._metadata: Mapping[str, Any] | None = None
        self._report: _native.Report | None = None

    @cached_property
    def _convert(self) -> Converter:
        # Not when the checkpoint is opened: looking at it needs no framework.
        return converter(*self._framework)

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of the checkpoint."""
        return self._opened.keys()

    def metadata(self) -> Mapping[str, Any] | None:
        """What the files say about themselves; ``None`` if that is nothing.

        Of safetensors files a dictionary of texts, their ``__metadata__``. Of GGUF files a read-only mapping of their
        keys and values, in the order of the file; arrays in it are sequences that are read when they are looked at,
        see `MetadataArray`. Whoever keeps such arrays unread keeps their files open.
        """
        if self._metadata is None:
            metadata, key_values = self._opened.metadata(), self._opened.key_values()
            if key_values is None:
                return metadata
            self._metadata = read_only(key_values, metadata or {})
        return self._metadata

    def files(self) -> list[str]:
        """The files, in order."""
        return [os.fspath(path) for path in self._opened.files()]

    def get_shape(self, name: str) -> list[int]:
        """Shape of a tensor, without loading it: that of its elements, also where they are quantised."""
        return list(self._opened.info(name)[1])

    def get_dtype(self, name: str) -> str:
        """Element type of a tensor without loading it, by the name that safetensors or ggml give it."""
        return self._opened.info(name)[0]

    def get_tensor(self, name: str) -> Any:
        """Loads one tensor."""
        self._opened.info(name)
        return self._load({"select": [name]})[name]

    __getitem__ = get_tensor

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor that loads what it is indexed with."""
        dtype, shape, *_ = self._opened.info(name)
        return TensorSlice(self, name, dtype, list(shape))

    def _part(self, name: str, index: Any) -> _Part:
        dtype, shape, _, block_len = self._opened.info(name)
        packing = None
        if block_len > 1:
            packing = f"its elements lie in blocks of {block_len}"
        elif dtype == "F4" and self._is_torch:
            packing = "torch packs pairs of F4 elements"
        return _Part(name, index, shape, packing)

    def load(
        self,
        *,
        select: Select | None = None,
        exclude: str | Iterable[str] | None = None,
        slices: Mapping[str, Any] | None = None,
        progress: Progress = False,
        pool: _native.MemoryPool | None = None,
        **options: Unpack[LoadOptions],
    ) -> LoadedTensors:
        """Loads tensors; see `load_file` for the arguments."""
        _check_names(options)
        parts = {name: self._part(name, index) for name, index in (slices or {}).items()}
        request = {
            "select": self._selected(select),
            "exclude": _listed(exclude),
            "slices": {name: part.ranges for name, part in parts.items()} or None,
            "pool": pool,
            **options,
        }
        tensors = self._load(request, progress)
        for name, part in parts.items():
            if name in tensors:
                tensors[name] = part.finish(tensors[name])
        return tensors

    def iter_tensors(
        self,
        *,
        select: Select | None = None,
        exclude: str | Iterable[str] | None = None,
        pool: _native.MemoryPool | None = None,
        **options: Unpack[LoadOptions],
    ) -> Iterator[tuple[str, Any]]:
        """Gives ``(name, tensor)`` as tensors become complete, while the rest is still being loaded."""
        _check_names(options)
        request = {
            "select": self._selected(select),
            "exclude": _listed(exclude),
            "pool": pool,
            **options,
        }
        merged = self._merged(request)
        if self._is_mapped(merged):
            yield from self._load(request).items()
            return
        convert = self._convert
        loading = self._opened.start(**merged)
        try:
            while (tensor := loading.next()) is not None:
                converted: dict[str, Any] = {}
                convert([tensor], converted)
                yield tensor.name, converted[tensor.name]
            self._note(loading.report())
        finally:
            loading.cancel()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self.iter_tensors()

    def __len__(self) -> int:
        return len(self._opened)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._opened

    @property
    def report(self) -> Report | None:
        """What all loads that were completed did, as one; ``None`` before the first."""
        return None if self._report is None else Report._from_native(self._report)

    def warm(self) -> dict[str, Any]:
        """Brings the files into the page cache; returns what ``windlass warm --json`` prints."""
        report: dict[str, Any] = json.loads(self._opened.warm())
        return report

    def manifest(self) -> dict[str, Any]:
        """BLAKE3 digests of all tensors, read a second, plain way: what ``windlass verify --json`` prints."""
        manifest: dict[str, Any] = json.loads(self._opened.manifest())
        return manifest

    def close(self) -> None:
        """Closes the files. Tensors that were loaded stay valid.

        Open stay, until nobody has them any more: the files of mapped tensors, of loads that are under way, and of
        arrays of `metadata` that were not read.
        """
        self._native = self._metadata = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._native is None:
            return "Checkpoint(closed)"
        return f"Checkpoint({len(self)} tensors in {self.files()})"

    @property
    def _opened(self) -> _native.Checkpoint:
        if self._native is None:
            raise ValueError("this checkpoint is closed")
        return self._native

    def _selected(self, select: Select | None) -> list[str] | None:
        if callable(select):
            return [name for name in self.keys() if select(name)]
        return _listed(select)

    def _is_mapped(self, options: Mapping[str, Any]) -> bool:
        return (options.get("route") or os.environ.get("WINDLASS_ROUTE")) == "mapped"

    def _merged(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The options of one load: its own, else those of the checkpoint."""
        return {**self._options, **{name: value for name, value in request.items() if value is not None}}

    def _load(self, request: Mapping[str, Any], progress: Progress = False) -> LoadedTensors:
        options = self._merged(request)
        # Before anything is read: whoever lacks the framework should not wait for a load.
        convert = self._convert
        tensors: list[Tensor]
        if self._is_mapped(options):
            tensors, native_report = self._opened.map(**options)
        else:
            loading = self._opened.start(**options)
            with _callback(progress, loading) as callback:
                tensors = loading.wait(callback)
            native_report = loading.report()
        loaded = LoadedTensors(native_report)
        convert(tensors, loaded)
        self._note(native_report)
        return loaded

    def _note(self, report: _native.Report) -> None:
        self._report = report if self._report is None else self._report.merged(report)


class TensorSlice:
    """A tensor that is loaded as far as it is indexed: ``checkpoint.get_slice(name)[2:4, :, -1]``.

    Indices are integers, slices with a positive step, and an ellipsis. Unlike those of lists, slices that
    leave a dimension are errors: they would hide a wrong shape.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: str, shape: list[int]) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._dtype = dtype
        self._shape = shape

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Element type by the name that safetensors or ggml give it."""
        return self._dtype

    def __getitem__(self, index: Any) -> Any:
        part = self._checkpoint._part(self._name, index)
        request = {"select": [self._name], "slices": {self._name: part.ranges}}
        return part.finish(self._checkpoint._load(request)[self._name])


class _Part:
    """An index into a tensor: the ranges to read, and what is left to do with the result."""

    def __init__(self, name: str, index: Any, shape: Sequence[int], packing: str | None) -> None:
        # Of a packed type one sees bytes, or pairs of elements: steps would take those.
        self._unit_steps = None if packing is None else (len(shape) - 1, packing)
        if isinstance(index, list):
            if index:
                raise SliceError(f"tensor {name!r} cannot be indexed with a list; use slices", tensor=name)
            index = slice(0, 0)
        items = list(index) if isinstance(index, tuple) else [index]
        ellipses = sum(item is Ellipsis for item in items)
        if ellipses > 1:
            raise SliceError(f"tensor {name!r} is indexed with more than one ellipsis", tensor=name)
        if len(items) - ellipses > len(shape):
            raise SliceError(
                f"tensor {name!r} of shape {list(shape)} is indexed with {len(items) - ellipses} dimensions",
                tensor=name,
            )
        if ellipses:
            position = next(i for i, item in enumerate(items) if item is Ellipsis)
            items[position : position + 1] = [slice(None)] * (len(shape) - len(items) + 1)
        self.ranges: list[tuple[int, int]] = []
        self._then: list[Any] = []
        for dimension, (item, size) in enumerate(zip(items, shape, strict=False)):
            self._add(name, dimension, item, size)

    def _add(self, name: str, dimension: int, item: Any, size: int) -> None:
        where = f"dimension {dimension} of tensor {name!r}, which has size {size}"
        if isinstance(item, slice):
            step = 1 if item.step is None else item.step
            if not isinstance(step, int) or step < 1:
                raise SliceError(f"step {step} for {where}: steps must be positive", tensor=name)
            if step != 1 and self._unit_steps is not None and dimension == self._unit_steps[0]:
                raise SliceError(f"step {step} for {where}: {self._unit_steps[1]}", tensor=name)
            try:
                start = 0 if item.start is None else operator.index(item.start)
                stop = size if item.stop is None else operator.index(item.stop)
            except TypeError as error:
                raise SliceError(f"{item} cannot index {where}: {error}", tensor=name) from error
            start, stop = (bound + size if bound < 0 else bound for bound in (start, stop))
            if not 0 <= start <= size or not 0 <= stop <= size:
                raise SliceError(f"slice {item.start}:{item.stop} leaves {where}", tensor=name)
            self.ranges.append((start, max(start, stop)))
            self._then.append(slice(None, None, step))
        elif hasattr(item, "__index__") and not isinstance(item, bool):
            position = item.__index__()
            if not -size <= position < size:
                raise SliceError(f"index {position} is outside {where}", tensor=name)
            position %= size
            self.ranges.append((position, position + 1))
            self._then.append(0)
        else:
            raise SliceError(f"{item!r} cannot index {where}: use integers, slices and '...'", tensor=name)

    def finish(self, tensor: Any) -> Any:
        """Drops the dimensions that were indexed with integers, and applies steps."""
        if all(item == slice(None, None, 1) for item in self._then):
            return tensor
        if isinstance(tensor, _native.Tensor):
            raise OptionError("framework 'raw' takes slices of step 1 only, no integers")
        return tensor[tuple(self._then)]


def _check_names(options: Mapping[str, Any]) -> None:
    """Fails for options that no load has. Device and allocator belong to the checkpoint, and to each other."""
    unknown = set(options) - set(LoadOptions.__annotations__)
    if unknown:
        names = ", ".join(LoadOptions.__annotations__)
        raise OptionError(f"option cannot be {min(unknown)!r}: the options are {names}")


@cache
def _find_cufile() -> None:
    """Shows the engine where packages of Python keep cuFile."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for directory in ("cu13/lib", "cufile/lib"):
            _native.search_cufile_in(os.path.join(root, directory))


@cache
def _usrbio_directories() -> list[str] | None:
    """Where the vendor's Python package for 3FS keeps its library, if it is installed."""
    spec = importlib.util.find_spec("hf3fs_py_usrbio")
    if spec is None:
        return None
    packages = list(spec.submodule_search_locations or [])
    sites = [os.path.dirname(package) for package in packages] or [os.path.dirname(spec.origin or "")]
    beside = [os.path.join(site, name) for site in sites for name in ("hf3fs_py_usrbio.libs", "")]
    return beside + [os.path.join(package, name) for package in packages for name in ("lib", "")]


def _listed(names: str | Iterable[str] | None) -> list[str] | None:
    return [names] if isinstance(names, str) else None if names is None else list(names)


@contextmanager
def _callback(progress: Progress, loading: _native.Loading) -> Iterator[Callable[[int, int], object] | None]:
    if progress is False:
        yield None
        return
    if progress is not True:
        yield progress
        return
    try:
        from tqdm.auto import tqdm  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("progress=True needs tqdm; install it or give a callable") from error
    _, total = loading.progress()
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def update(done: int, _total: int) -> None:
            bar.update(done - bar.n)

        yield update
