"""Loading: `load_file` loads all tensors at once; `open` gives single tensors, slices and streams."""

from __future__ import annotations

import importlib.util
import json
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from hoistway import _native, _totals
from hoistway._arguments import PathType, path_texts, refuse_unknown, tensor_name, tensor_names
from hoistway._devices import find_libraries
from hoistway._frameworks import (
    Converter,
    Framework,
    Jax,
    Numpy,
    Raw,
    T,
    Torch,
    cause_of,
    check_framework,
    check_packages,
    converter,
    device_name,
    is_torch,
    torch_allocator,
    types_without_package,
)
from hoistway._metadata import read_only
from hoistway._options import LoadOptions, StoreOptions, store_texts
from hoistway._report import Report
from hoistway._slices import Part
from hoistway._stream import (
    BATCH,
    PATIENCE,
    Mapped,
    Order,
    Tensors,
    TensorStream,
    as_they_arrive,
    converted,
    interleaved,
)
from hoistway._targets import CopyInto, Target, Wanted, chosen, filled, mark_as_written
from hoistway._words import counted, in_words, listed, preformatted
from hoistway.errors import ClosedError, MissingPackageError, OptionError, SliceError, TargetError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from hoistway._calls import LoadFileArguments, OpenArguments
    from hoistway._frameworks import JaxArray, NumpyArray, TorchTensor
    from hoistway._native import Tensor

Progress = Callable[[int, int], object] | bool
Select = str | Iterable[str] | Callable[[str], bool]

_noting = RLock()
"""Guards the reports of all checkpoints, for a moment. A signal handler that loads may interrupt its holder."""


def _begin_in_child() -> None:
    # A thread that the child lacks may hold it.
    global _noting  # noqa: PLW0603
    _noting = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


class LoadedTensors(dict[str, T], Generic[T]):
    """Tensors by name, with the report of the load."""

    def __init__(self, report: _native.Report) -> None:
        super().__init__()
        self._report = report

    @property
    def report(self) -> Report:
        """The report of the load."""
        return Report._from_native(self._report)

    def __repr__(self) -> str:
        # That of a dictionary would print elements of all tensors.
        bytes_loaded = in_words(self.report.tensor_bytes)
        return f"<{type(self).__name__}: {counted(len(self), 'tensor')}, {bytes_loaded} loaded>"

    def _repr_html_(self) -> str:
        rows = ((name, _dtype_of(tensor), _shape_of(tensor)) for name, tensor in self.items())
        return listed(rows, len(self)) + preformatted(str(self.report))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles lack the report, which is about this load. They are ordered dictionaries, which
        `torch.load` accepts for weights.
        """
        return OrderedDict, (), None, None, iter(self.items())


@overload
def load_file(
    path: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Torch = ...,
    **arguments: Unpack[LoadFileArguments],
) -> LoadedTensors[TorchTensor]: ...
@overload
def load_file(
    path: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Numpy,
    **arguments: Unpack[LoadFileArguments],
) -> LoadedTensors[NumpyArray]: ...
@overload
def load_file(
    path: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Jax,
    **arguments: Unpack[LoadFileArguments],
) -> LoadedTensors[JaxArray]: ...
@overload
def load_file(
    path: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Raw,
    **arguments: Unpack[LoadFileArguments],
) -> LoadedTensors[Tensor]: ...
@overload
def load_file(
    path: PathType | Sequence[PathType],
    device: Any = None,
    *,
    framework: Framework,
    **arguments: Unpack[LoadFileArguments],
) -> LoadedTensors[Any]: ...
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
    store: StoreOptions | None = None,
    cache: PathType | None = None,
    **options: Unpack[LoadOptions],
) -> LoadedTensors[Any]:
    """Loads a checkpoint into memory.

    Args:
        path: A safetensors or GGUF file, an index, a directory, a glob pattern, a URL (``s3://``, ``gs://``, ``az://``,
            ``hf://``, ``https://``; of a folder with ``/`` at its end), or a list of these.
        device: Where to put the tensors: ``"cpu"``, ``"cuda:1"``, ``"rocm:0"``, a number, or a `torch.device`.
            Default: ``HOISTWAY_DEVICE``, else ``"cpu"``.
        framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, ``"paddle"``, or ``"raw"`` for
            `hoistway.Tensor`.
        select: Names or glob patterns of the tensors to load, or a predicate on names. Default: all.
        exclude: Names or glob patterns of tensors to leave out.
        slices: For some tensors, by name, the part to load: what you would index the tensor with.
        progress: A function that is called with the bytes loaded and the total; ``True`` for a progress bar by tqdm.
        pool: Host memory to load into, which was touched before.
        allocator: What allocates device memory: ``"driver"``, or ``"torch"`` for the allocator of torch.
        lenient: Whether to accept files that violate the specification of their format in harmless ways: safetensors
            files with padding after the last tensor, and GGUF files that other readers accept. Default:
            ``HOISTWAY_LENIENT``, else ``False``.
        offset: Byte at which the GGUF begins, for GGUF files that are embedded in other files. Default: 0.
        store: Endpoint and credentials of the object store of a URL: see `StoreOptions`. Default: the environment.
        cache: Directory on a drive of this machine that keeps what is read from object stores, for the next load of any
            process. Default: ``HOISTWAY_CACHE``, else none. ``HOISTWAY_CACHE_BYTES`` limits its size.
        options: The options of ``hoistway load``; see `LoadOptions`.

    Returns:
        A dictionary of tensors in the order of the checkpoint, with the report of the load as the attribute
        ``report``. Quantised tensors of GGUF files are ``uint8``: their last dimension counts bytes.
    """
    with Checkpoint(
        path,
        device=device,
        framework=framework,
        allocator=allocator,
        lenient=lenient,
        offset=offset,
        store=store,
        cache=cache,
    ) as checkpoint:
        return checkpoint.load(
            select=select, exclude=exclude, slices=slices, progress=progress, pool=pool, **options
        )


class Checkpoint(Generic[T]):
    """An open checkpoint. Tensors loaded from it stay valid after it is closed.

    Iterating it gives ``(name, tensor)`` in the order in which tensors become complete.

    Args:
        paths: A safetensors or GGUF file, an index, a directory, a glob pattern, a URL (``s3://``, ``gs://``, ``az://``,
            ``hf://``, ``https://``; of a folder with ``/`` at its end), or a list of these. One file of a split GGUF
            model stands for all.
        device: Where to put tensors: ``"cpu"``, ``"cuda:1"``, ``"rocm:0"``, a number, or a `torch.device`.
        framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, ``"paddle"``, or ``"raw"``.
        pool: Host memory for all loads that name no other pool. It was touched before.
        allocator: What allocates device memory: ``"driver"``, or ``"torch"`` for the allocator of torch.
        lenient: Whether to accept files that violate the specification of their format in harmless ways: safetensors
            files with padding after the last tensor, and GGUF files that other readers accept. Default:
            ``HOISTWAY_LENIENT``, else ``False``.
        offset: Byte at which the GGUF begins, for GGUF files that are embedded in other files. Default: 0.
        store: Endpoint and credentials of the object store of a URL: see `StoreOptions`. Default: the environment.
        cache: Directory on a drive of this machine that keeps what is read from object stores, for the next load of any
            process. Default: ``HOISTWAY_CACHE``, else none. ``HOISTWAY_CACHE_BYTES`` limits its size.
        options: Options of all loads; see `LoadOptions`. Options of a load win over these.
    """

    @overload
    def __init__(
        self: Checkpoint[TorchTensor],
        paths: PathType | Sequence[PathType],
        *,
        device: Any = None,
        framework: Torch = ...,
        **arguments: Unpack[OpenArguments],
    ) -> None: ...
    @overload
    def __init__(
        self: Checkpoint[NumpyArray],
        paths: PathType | Sequence[PathType],
        *,
        device: Any = None,
        framework: Numpy,
        **arguments: Unpack[OpenArguments],
    ) -> None: ...
    @overload
    def __init__(
        self: Checkpoint[JaxArray],
        paths: PathType | Sequence[PathType],
        *,
        device: Any = None,
        framework: Jax,
        **arguments: Unpack[OpenArguments],
    ) -> None: ...
    @overload
    def __init__(
        self: Checkpoint[Tensor],
        paths: PathType | Sequence[PathType],
        *,
        device: Any = None,
        framework: Raw,
        **arguments: Unpack[OpenArguments],
    ) -> None: ...
    @overload
    def __init__(
        self: Checkpoint[Any],
        paths: PathType | Sequence[PathType],
        *,
        device: Any = None,
        framework: Framework,
        **arguments: Unpack[OpenArguments],
    ) -> None: ...
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
        store: StoreOptions | None = None,
        cache: PathType | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        chosen = os.environ.get("HOISTWAY_DEVICE", "cpu") if device is None else device
        name = device_name(chosen, framework)
        check_framework(framework, name)
        self._framework = framework, name
        self._options: dict[str, Any] = {"device": name, "pool": pool, **options}
        if allocator == "torch" and name == "cpu":
            raise OptionError(
                "allocator cannot be 'torch': it gives memory of a device, and the device is 'cpu'"
            )
        if allocator == "torch":
            self._options["allocator"] = torch_allocator(name)
        elif allocator != "driver":
            raise OptionError(f"allocator cannot be {allocator!r}: it must be one of driver, torch")
        if name != "cpu":
            find_libraries()
        self._options["usrbio_directories"] = usrbio_directories()
        check_names(options)
        if offset is not None and (not hasattr(offset, "__index__") or not 0 <= offset < 1 << 64):
            raise OptionError(f"offset cannot be {offset!r}: it must be a number of bytes")
        _native.check_options(**self._options)
        self._native: _native.Checkpoint | None = _native.Checkpoint(
            path_texts(paths),
            lenient=lenient,
            offset=offset or 0,
            store=store_texts(store),
            cache=None if cache is None else os.fspath(cache),
        )
        self._converter: Converter | None = None
        self._metadata: Mapping[str, Any] | None = None
        self._report: _native.Report | None = None

    @property
    def _convert(self) -> Converter:
        # Not when the checkpoint is opened: looking at it needs no framework. Before Python 3.12, `cached_property`
        # has one lock for all checkpoints, held while a framework is imported: loads of other threads and of
        # children of `fork` would wait for it.
        if self._converter is None:
            self._converter = converter(*self._framework)
        return self._converter

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of the checkpoint."""
        return self._opened.keys()

    def metadata(self) -> Mapping[str, Any] | None:
        """The metadata of the files; ``None`` if there is none.

        For safetensors files this is a dictionary of text to text, their ``__metadata__``. For GGUF files it is a
        read-only mapping of their keys and values, in the order of the file. Its arrays are sequences that are read
        when they are used: see `MetadataArray`. An array that was not read keeps its file open.
        """
        if self._metadata is None:
            metadata, key_values = self._opened.metadata(), self._opened.key_values()
            if key_values is None:
                return metadata
            self._metadata = read_only(key_values, metadata or {})
        return self._metadata

    def files(self) -> list[str]:
        """The paths of the files, in order."""
        return self._opened.files()

    def get_shape(self, name: str) -> list[int]:
        """Shape of a tensor in elements, also if they are quantised. Loads nothing."""
        return list(self._info(name)[1])

    def get_dtype(self, name: str) -> str:
        """Element type of a tensor, by its name in safetensors or ggml. Loads nothing."""
        return self._info(name)[0]

    def get_tensor(self, name: str) -> T:
        """Loads one tensor."""
        self._info(name)
        return self._load({"select": [name]})[name]

    __getitem__ = get_tensor

    def get_slice(self, name: str) -> TensorSlice[T]:
        """A tensor of which the part is loaded that it is indexed with."""
        dtype, shape, *_ = self._info(name)
        return TensorSlice(self, name, dtype, list(shape))

    def _part(self, name: str, index: Any) -> Part:
        return Part(name, index, self._info(name), is_torch=is_torch(self._framework[0]))

    def load(
        self,
        *,
        select: Select | None = None,
        exclude: str | Iterable[str] | None = None,
        slices: Mapping[str, Any] | None = None,
        progress: Progress = False,
        pool: _native.MemoryPool | None = None,
        **options: Unpack[LoadOptions],
    ) -> LoadedTensors[T]:
        """Loads tensors; see `load_file` for the arguments."""
        request, parts = self._request(select, exclude, slices, pool, options)
        for part in parts.values():
            part.check_framework(self._framework[0])
        tensors = self._load(request, progress)
        for name, part in parts.items():
            tensors[name] = part.finish(tensors[name])
        return tensors

    def iter_tensors(
        self,
        *,
        select: Select | None = None,
        exclude: str | Iterable[str] | None = None,
        slices: Mapping[str, Any] | None = None,
        order: Order = "arrival",
        max_in_flight: int | str | None = None,
        copy_into: CopyInto | None = None,
        pool: _native.MemoryPool | None = None,
        **options: Unpack[LoadOptions],
    ) -> TensorStream[T]:
        """Yields ``(name, tensor)`` one after the other, while the other tensors are still being loaded.

        Args:
            select: As in `load_file`.
            exclude: As in `load_file`.
            slices: As in `load_file`.
            order: ``"arrival"``: as tensors become complete; ``"file"``: the order of the checkpoint.
            max_in_flight: Limit on the bytes of tensors in flight, a number or text such as ``"1GiB"``. Tensors in
                flight are being loaded, or loaded and not yet delivered, or the one delivered last. A caller that drops
                each tensor before the next one stays within this limit, except for the huge pages at the ends of
                tensors, and on a device: two pieces of memory, of at most half the limit, are kept for the next
                tensors. A tensor larger than the limit is loaded alone. A pool, or the reserve of huge pages, must
                still have room for all tensors. Targets of ``copy_into`` and mapped tensors do not count. Default: no
                limit.
            copy_into: The caller's memory to read tensors into. Either a mapping from names of tensors to targets, or
                a function that is called with name, type and shape of each tensor and returns a target or ``None``.
                A target is a tensor of torch, an array of numpy, a writable buffer, or an object with a CUDA array
                interface. It must be contiguous, with the type and shape of its tensor or slice, and must not be used
                or resized until it is delivered. Targets of tensors that are not selected are left alone. Tensors
                without a target are loaded into memory of hoistway. Autograd sees a target of torch as changed in
                place. Options for the memory of tensors apply to those without a target; if all tensors have one, such
                options are errors, unless they come from the checkpoint or the environment. After an error, the
                contents of targets that were not delivered are undefined.
            pool: As in `load_file`.
            options: As in `load_file`.

        Returns:
            An iterator with the attribute ``report``. Closing it, or leaving its ``with`` block, ends the load.
        """
        request, parts = self._request(select, exclude, slices, pool, options)
        if order not in ("arrival", "file"):
            raise OptionError(f"order cannot be {order!r}: it must be one of arrival, file")
        targets: dict[str, Target] = {}
        if copy_into is not None:
            if not callable(copy_into):
                self._check_existence(copy_into)
            wanted = self._wanted(request, parts)
            targets = chosen(copy_into, wanted)
            rest = [name for name in wanted if name not in targets]
            request.update(select=rest, exclude=None)
        if targets and not rest:
            filling = self._fill(targets, request, order, is_all=True)
            return TensorStream(filled(filling, targets), [filling], self._note)
        for name, part in parts.items():
            if name not in targets:
                part.check_framework(self._framework[0])
        most = BATCH if max_in_flight is None else 1
        tensors = self._start(request, order, max_in_flight)
        if not targets:
            return TensorStream(converted(tensors, self._convert, parts, most), [tensors], self._note)
        try:
            filling = self._fill(targets, request, order, is_all=False)
        except BaseException:
            # The traceback would keep it running, and its memory.
            tensors.cancel()
            raise
        patience = PATIENCE if order == "arrival" else None
        given = filled(filling, targets, patience)
        others = converted(tensors, self._convert, parts, most, patience)
        both = (
            as_they_arrive(given, others)
            if order == "arrival"
            else interleaved(given, others, [name in targets for name in wanted])
        )
        # What the report says of memory is that of the tensors that get some.
        return TensorStream(both, [tensors, filling], self._note)

    def copy_into(
        self,
        targets: Mapping[str, Any],
        *,
        slices: Mapping[str, Any] | None = None,
        **options: Unpack[LoadOptions],
    ) -> Report:
        """Reads the named tensors into memory of the caller. All of them are read, or the call fails.

        Args:
            targets: Names of tensors, without patterns, and their targets: see `Checkpoint.iter_tensors`.
            slices: As in `load_file`.
            options: As in `load_file`, without the routes ``unified`` and ``mapped``.

        Returns:
            The report of the load.
        """
        names = list(targets)
        self._check_existence(names)
        for name in names:
            if targets[name] is None:
                raise TargetError(f"the target of tensor {name!r} is None", tensor=name)
        stream = self.iter_tensors(select=names, slices=slices, copy_into=targets, **options)
        deque(stream, maxlen=0)
        return stream.report

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return self.iter_tensors()

    def items(self) -> TensorStream[T]:
        """Yields ``(name, tensor)`` in the order of `keys`, while the other tensors are still being loaded."""
        return self.iter_tensors(order="file")

    def __len__(self) -> int:
        return len(self._opened)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._opened

    @property
    def report(self) -> Report | None:
        """One report of all completed loads; ``None`` before the first."""
        return None if self._report is None else Report._from_native(self._report)

    def warm(self) -> dict[str, Any]:
        """Reads the files into the page cache. Returns what ``hoistway warm --json`` prints, but the version."""
        report: dict[str, Any] = json.loads(self._opened.warm())
        return report

    def manifest(self) -> dict[str, Any]:
        """Returns BLAKE3 digests of all tensors, read by plain reads, as ``hoistway verify --save`` writes them."""
        manifest: dict[str, Any] = json.loads(self._opened.manifest())
        return manifest

    def close(self) -> None:
        """Closes the files. Tensors that were loaded stay valid.

        The files of mapped tensors, of loads in flight and of unread arrays of `metadata` stay open until these are
        dropped.
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
        files = self.files()
        where = files[0] if len(files) == 1 else f"{len(files)} files, the first is {files[0]}"
        return f"Checkpoint({counted(len(self), 'tensor')} in {where})"

    def _repr_html_(self) -> str:
        if self._native is None:
            return preformatted(repr(self))
        rows = ((name, self.get_dtype(name), str(self.get_shape(name))) for name in self.keys())
        return preformatted(repr(self)) + listed(rows, len(self))

    @property
    def _opened(self) -> _native.Checkpoint:
        if self._native is None:
            raise ClosedError("this checkpoint is closed")
        return self._native

    def _request(
        self,
        select: Select | None,
        exclude: str | Iterable[str] | None,
        slices: Mapping[str, Any] | None,
        pool: _native.MemoryPool | None,
        options: LoadOptions,
    ) -> tuple[dict[str, Any], dict[str, Part]]:
        """The request to the engine, and the part of slicing that Python does."""
        check_names(options)
        parts = {name: self._part(name, index) for name, index in (slices or {}).items()}
        request = {
            "select": self._selected(select),
            "exclude": None if exclude is None else tensor_names("exclude", exclude),
            "slices": {name: part.ranges for name, part in parts.items()} or None,
            "pool": pool,
            **options,
        }
        if parts:
            selection = {name: request[name] for name in ("select", "exclude")}
            read = {name for name, *_ in self._opened.planned(**selection)}
            for name in parts:
                if name not in read:
                    raise SliceError(f"there is a slice of tensor {name!r}, which is not read", tensor=name)
        return request, parts

    def _check_existence(self, names: Iterable[str]) -> None:
        """Fails if a name is not exactly that of a tensor."""
        for name in names:
            self._info(name)

    def _info(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """Element type and shape of a tensor, and the length of its blocks; an error if there is no such tensor."""
        return self._opened.info(tensor_name(name))

    def _wanted(self, request: Mapping[str, Any], parts: Mapping[str, Part]) -> dict[str, Wanted]:
        """The results of a load, by name and in the order of the checkpoint."""
        selection = {name: request[name] for name in ("select", "exclude", "slices")}
        wanted = {}
        for name, dtype, shape, bytes_shape, nbytes in self._opened.planned(**selection):
            kept = parts[name].kept if name in parts else tuple
            raw = None if bytes_shape is None else kept(bytes_shape)
            wanted[name] = Wanted(name, dtype, kept(shape), raw, nbytes)
        return wanted

    def _check_framework(self) -> None:
        """Fails if the framework is missing."""
        _ = self._convert

    def _check_packages(self, request: Mapping[str, Any]) -> None:
        """Fails if the framework needs a missing package for the type of a tensor of the load."""
        lacking = types_without_package(self._framework[0])
        if not lacking:
            return
        selection = {name: request.get(name) for name in ("select", "exclude", "slices")}
        planned = self._opened.planned(**selection)
        check_packages(((name, dtype) for name, dtype, *_ in planned), lacking)

    def _start(self, request: Mapping[str, Any], order: Order, max_in_flight: int | str | None) -> Tensors:
        merged = self._merged(request)
        # Before anything is read: a missing framework is an error before the load, not after it.
        self._check_framework()
        self._check_packages(request)
        if self._is_mapped(merged):
            return Mapped(*self._opened.map(**self._merged_for_mapping(request)))
        return self._opened.start(order=order, max_in_flight=max_in_flight, **merged)

    def _fill(
        self, targets: Mapping[str, Target], request: Mapping[str, Any], order: Order, *, is_all: bool
    ) -> _native.Filling:
        memories = {name: target.memory for name, target in targets.items()}
        # Options for the memory of tensors are kept only if this load names them: then the engine refuses them.
        own = {name: value for name, value in request.items() if value is not None} if is_all else {}
        merged = {**_without_own_memory(self._merged(request)), **own, "select": list(targets)}
        filling = self._opened.fill(memories, order=order, **merged)
        mark_as_written(targets)
        return filling

    def _selected(self, select: Select | None) -> list[str] | None:
        if callable(select):
            return [name for name in self.keys() if select(name)]
        return None if select is None else tensor_names("select", select)

    def _is_mapped(self, options: Mapping[str, Any]) -> bool:
        return (options.get("route") or os.environ.get("HOISTWAY_ROUTE")) == "mapped"

    def _merged(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The options of one load. They win over those of the checkpoint."""
        return {**self._options, **{name: value for name, value in request.items() if value is not None}}

    def _merged_for_mapping(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a mapping, which allocates no memory. Options for memory are kept, and so refused by the engine,
        only if they were given where the route was, or later: others are for loads by other routes.
        """
        merged = self._merged(request)
        given = {name: value for name, value in request.items() if value is not None}
        if "route" not in given:
            given = merged if self._options.get("route") else {}
        others = {
            name: value
            for name, value in merged.items()
            if name not in _PLACES and (name, value) != ("huge_pages", "reserved")
        }
        return {**others, **given}

    def _load(self, request: Mapping[str, Any], progress: Progress = False) -> LoadedTensors[T]:
        tensors, native_report = self._load_native(request, progress)
        loaded: LoadedTensors[T] = LoadedTensors(native_report)
        self._convert(tensors, loaded)
        return loaded

    def _load_native(
        self, request: Mapping[str, Any], progress: Progress = False
    ) -> tuple[list[Tensor], _native.Report]:
        """Loads tensors, and leaves it to the caller to convert them."""
        options = self._merged(request)
        # Before anything is read: a missing framework is an error before the load, not after it.
        self._check_framework()
        self._check_packages(request)
        tensors: list[Tensor]
        if self._is_mapped(options):
            tensors, native_report = self._opened.map(**self._merged_for_mapping(request))
        else:
            if progress is True:
                # Importing it takes long enough to falsify the rate.
                _bars()
            loading = self._opened.start(**options)
            if progress is False:
                tensors = loading.wait(None)
            else:
                _, total = loading.progress()
                with _callback(progress, total) as callback:
                    tensors = loading.wait(callback)
            native_report = loading.report()
        self._note(native_report)
        return tensors, native_report

    def _note(self, report: _native.Report) -> None:
        with _noting:
            is_first = self._report is None
            self._report = report if self._report is None else self._report.merged(report)
        _totals.note(report, is_first=is_first)


class TensorSlice(Generic[T]):
    """A tensor of which the part is loaded that it is indexed with: ``checkpoint.get_slice(name)[2:4, :, -1]``.

    Indices are integers, slices with a positive step, and an ellipsis. Unlike with lists, a slice that goes beyond a
    dimension is an error: it would hide a wrong shape.
    """

    def __init__(self, checkpoint: Checkpoint[T], name: str, dtype: str, shape: list[int]) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._dtype = dtype
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self._shape)

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor, as a list."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Element type, by its name in safetensors or ggml."""
        return self._dtype

    def __getitem__(self, index: Any) -> T:
        part = self._checkpoint._part(self._name, index)
        part.check_framework(self._checkpoint._framework[0])
        request = {"select": [self._name], "slices": {self._name: part.ranges}}
        finished: T = part.finish(self._checkpoint._load(request)[self._name])
        return finished

    def __repr__(self) -> str:
        return f"TensorSlice({self._name!r}, {self._dtype}, {self._shape})"

    def _repr_html_(self) -> str:
        return preformatted(repr(self))


def _dtype_of(tensor: Any) -> str:
    return str(getattr(tensor, "dtype", "")).removeprefix("torch.")


def _shape_of(tensor: Any) -> str:
    return str(list(getattr(tensor, "shape", ())))


def check_names(options: Mapping[str, Any]) -> None:
    """Fails for options that no load has. Device and allocator are options of the checkpoint."""
    refuse_unknown(options, list(LoadOptions.__annotations__), elsewhere=_ELSEWHERE, near=_ARGUMENTS)


_ELSEWHERE = {
    "allocator": "the allocator is chosen where the checkpoint is opened",
    "copy_into": "memory to read into is passed to iter_tensors",
    "device": "the device is chosen where the checkpoint is opened",
    "framework": "the framework is chosen where the checkpoint is opened",
    "max_in_flight": "only iter_tensors, which streams, has this limit; in_flight limits the reads of a load",
    "order": "only iter_tensors, which streams, has an order",
    "progress": "load_file and Checkpoint.load show progress",
}
"""Arguments of other calls, and where they belong."""

_ARGUMENTS = ("select", "exclude", "slices", "pool", "lenient", "offset", "store", "cache")
"""Arguments that are not options, but may be misspelt too."""

_PLACES = {"layout", "numa"}
"""Options for memory that a mapping does not allocate. A pool is always refused."""

_OWN_MEMORY = {"device", "pool", "allocator", "layout", "rings", "numa", "populate"}
"""Options for the memory of tensors without a target."""


def _without_own_memory(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that also apply to tensors with targets."""
    return {
        name: value
        for name, value in options.items()
        if name not in _OWN_MEMORY and (name, value) != ("huge_pages", "reserved")
    }


@cache
def usrbio_directories() -> list[str] | None:
    """The folders of the library in the vendor's Python package for 3FS, if that is installed."""
    spec = importlib.util.find_spec("hf3fs_py_usrbio")
    if spec is None:
        return None
    packages = list(spec.submodule_search_locations or [])
    sites = [os.path.dirname(package) for package in packages] or [os.path.dirname(spec.origin or "")]
    beside = [os.path.join(site, name) for site in sites for name in ("hf3fs_py_usrbio.libs", "")]
    return beside + [os.path.join(package, name) for package in packages for name in ("lib", "")]


@contextmanager
def _callback(progress: Progress, total: int) -> Iterator[Callable[[int, int], object]]:
    """The function that a load reports its progress to. For `True` it moves a progress bar by tqdm."""
    if not isinstance(progress, bool):
        yield progress
        return
    with _bars()(total=total, unit="B", unit_scale=True, unit_divisor=1000) as bar:

        def update(done: int, _total: int) -> None:
            bar.update(done - bar.n)

        yield update


@cache
def _bars() -> Any:
    try:
        from tqdm.auto import tqdm  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError("progress=True needs tqdm; install it or give a callable") from cause_of(
            error, "tqdm"
        )
    return tqdm
