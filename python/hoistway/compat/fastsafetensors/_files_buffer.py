"""Loaded tensors of all ranks' files, given whole, in shards, or to one rank.

All methods that give tensors are collective where there are several ranks: each calls them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hoistway import Report
from hoistway.compat.fastsafetensors._devices import Device
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._errors import UnknownTensorError
from hoistway.compat.fastsafetensors._framework import FrameworkOpBase, TensorBase, narrowed
from hoistway.compat.fastsafetensors._groups import Group
from hoistway.compat.fastsafetensors._metadata import SafeTensorsMetadata, TensorFrame
from hoistway.distributed._wants import shard
from hoistway.errors import FormatError, SliceError


@dataclass
class LoadedFile:
    """A file, and its tensors where this rank loaded it."""

    metadata: SafeTensorsMetadata
    device: Device
    tensors: dict[str, Any]
    names: frozenset[str] = frozenset()
    """The tensors that were asked for, on whichever rank."""
    taken: set[str] = field(default_factory=set)
    is_released: bool = False


class FilesBufferOnDevice:
    """The tensors of loaded files. They stay valid as long as someone holds them, also after `close`."""

    def __init__(  # noqa: PLR0917  (the parameters are the interface's)
        self,
        rank_loaders: Mapping[int, Sequence[LoadedFile]],
        pg: Group,
        framework: FrameworkOpBase[Any],
        auto_mem_delete: bool = True,
        keep_tensor: Callable[[str], bool] | None = None,
        borrowed_tensors: bool = False,
        *,
        cache: bool = False,
        report: Report | None = None,
    ) -> None:
        self.rank_loaders = {rank: list(files) for rank, files in rank_loaders.items()}
        self.pg = pg
        self.framework = framework
        self.borrowed_tensors = borrowed_tensors
        self.auto_mem_delete = auto_mem_delete and pg.size() > 1
        self.report = report
        """The report of the load of this rank's files; `None` if it had none."""
        self.key_to_rank_lidx: dict[str, tuple[int, int]] = {}
        self._cache: dict[tuple[str, int], Any] | None = {} if cache else None
        self._is_closed = False
        for rank, files in self.rank_loaders.items():
            for number, file in enumerate(files):
                names = [name for name in file.metadata.tensors if keep_tensor is None or keep_tensor(name)]
                file.names = frozenset(names)
                for name in names:
                    self._add(name, rank, number)

    def _add(self, name: str, rank: int, number: int) -> None:
        if name in self.key_to_rank_lidx:
            other, other_number = self.key_to_rank_lidx[name]
            paths = [self.rank_loaders[r][n].metadata.src for r, n in ((other, other_number), (rank, number))]
            raise FormatError(
                f"tensor {name!r} is in both {paths[0]} and {paths[1]}", path=paths[1], tensor=name
            )
        self.key_to_rank_lidx[name] = rank, number

    def close(self) -> None:
        """Lets go of all tensors. Those that were given out stay valid."""
        self.rank_loaders = {}
        self._cache = None
        self._is_closed = True

    def get_filename(self, tensor_name: str) -> str:
        """The file that a tensor is in."""
        return self._file(tensor_name)[1].metadata.src

    def get_shape(self, tensor_name: str) -> list[int]:
        """Shape of a whole tensor."""
        return self._file(tensor_name)[1].metadata.tensors[tensor_name].shape

    def get_tensor(self, tensor_name: str, device: Any = None, dtype: DType = DType.AUTO) -> Any:
        """A whole tensor, on every rank."""
        return self.get_tensor_wrapped(tensor_name, device, dtype).get_raw()

    def get_tensor_wrapped(
        self, tensor_name: str, device: Any = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """As `get_tensor`, with its type and device."""
        return self.get_sharded_wrapped(tensor_name, -1, device, dtype)

    def get_sharded(self, tensor_name: str, dim: int, device: Any = None, dtype: DType = DType.AUTO) -> Any:
        """This rank's part of a tensor, along a dimension; with -1 the whole tensor.

        Parts are blocks of the size divided by the number of ranks, rounded up: the last ranks may have less, or
        nothing.
        """
        return self.get_sharded_wrapped(tensor_name, dim, device, dtype).get_raw()

    def get_sharded_wrapped(
        self, tensor_name: str, dim: int, device: Any = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """As `get_sharded`, with its type and device."""
        part: TensorBase = self._part(tensor_name, dim)
        return part.to(device, dtype)

    def get_multi_cols(
        self, tensor_names: list[str], dim: int, device: Any = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """This rank's parts of several tensors, joined along the dimension in which they are parted.

        Tensors of one file stay in the order of the names; files follow in the order of ranks and paths. On one rank
        torch promotes tensors of several types; several ranks join those of one type only.
        """
        by_file: dict[tuple[int, int], list[str]] = {}
        frames = [self._available(name)[1].metadata.tensors[name] for name in tensor_names]
        if self.pg.size() > 1:
            # Before anything travels, and over all files: the error depends on nothing but what was asked for.
            _checked_dim(tensor_names, frames, dim, self.pg.size())
        for name in tensor_names:
            by_file.setdefault(self.key_to_rank_lidx[name], []).append(name)
        joined = [self._joined_parts(names, dim) for _, names in sorted(by_file.items())]
        whole = joined[0] if len(joined) == 1 else self.framework.concat_tensors(joined, dim)
        for name in tensor_names:
            self._take(name)
        result: TensorBase = whole.to(device, dtype)
        return result

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TensorBase]:
        """Several tensors, each parted along the dimension given, as `get_sharded_wrapped` gives them."""
        return {name: self._part(name, dim) for name, dim in tensor_shard_dim.items()}

    def push_tensor(
        self, tensor_name: str, dst_rank: int, device: Any = None, dtype: DType = DType.AUTO
    ) -> Any | None:
        """A whole tensor, on one rank alone; `None` elsewhere."""
        owner, file = self._available(tensor_name)
        own = self.pg.rank()
        if self.pg.size() == 1:
            return file.tensors[tensor_name].to(device, dtype).get_raw()
        if own == owner == dst_rank:
            return file.tensors[tensor_name].clone().to(device, dtype).get_raw()
        if own == owner:
            self.pg.send(file.tensors[tensor_name], dst_rank)
        elif own == dst_rank:
            received = self._empty(tensor_name, file)
            self.pg.receive(received, owner)
            return received.to(device, dtype).get_raw()
        return None

    def iter_local_tensors(self, tensor_names: list[str]) -> Iterator[tuple[str, Any]]:
        """Gives ``(name, tensor)`` in the order of the names, where there is but one rank."""
        if self.pg.size() != 1:
            raise RuntimeError(f"iter_local_tensors is for a single rank, and there are {self.pg.size()}")
        for name in tensor_names:
            yield name, self.get_tensor(name)

    def _part(self, name: str, dim: int) -> Any:
        if self._cache is not None and (name, dim) in self._cache:
            return self._cache[name, dim].clone()
        _, file = self._available(name)
        if self.pg.size() == 1:
            return file.tensors[name]
        part = self._broadcast(name) if dim == -1 else self._joined_parts([name], dim)
        if self._cache is not None:
            # The caller may change what it gets.
            self._cache[name, dim] = part.clone()
        self._take(name)
        return part

    def _broadcast(self, name: str) -> Any:
        owner, file = self._file(name)
        # A copy on the owner too: a reference to it should not keep the file's other tensors alive.
        whole = (
            file.tensors[name].clone().contiguous() if self.pg.rank() == owner else self._empty(name, file)
        )
        self.pg.broadcast(whole, owner)
        return whole

    def _joined_parts(self, names: list[str], dim: int) -> Any:
        """This rank's parts of tensors of one file, joined."""
        owner, file = self._file(names[0])
        ranks = self.pg.size()
        frames = [file.metadata.tensors[name] for name in names]
        dim = _checked_dim(names, frames, dim, ranks)
        if ranks == 1:
            return self.framework.concat_tensors([file.tensors[name] for name in names], dim)
        shapes = [_shape_of_part(frames, dim, rank, ranks) for rank in range(ranks)]
        own = self.framework.get_empty_tensor(shapes[self.pg.rank()], frames[0].dtype, file.device)
        parts = []
        if self.pg.rank() == owner:
            for rank in range(ranks):
                pieces = [
                    narrowed(file.tensors[name], dim, *shard(frame.shape[dim], 1, rank, ranks))
                    for name, frame in zip(names, frames, strict=True)
                ]
                parts.append(pieces[0] if len(pieces) == 1 else self.framework.concat_tensors(pieces, dim))
        # No rank has more than the first.
        longest = replace(frames[0], shape=shapes[0]).nbytes
        self.pg.scatter(own, parts, longest, owner)
        return own

    def _empty(self, name: str, file: LoadedFile) -> Any:
        frame = file.metadata.tensors[name]
        return self.framework.get_empty_tensor(frame.shape, frame.dtype, file.device)

    def _take(self, name: str) -> None:
        """Lets go of a file's tensors once all ranks have all of them."""
        if not self.auto_mem_delete:
            return
        _, file = self._file(name)
        file.taken.add(name)
        if file.taken >= file.names:
            file.tensors = {}
            file.is_released = True

    def _available(self, name: str) -> tuple[int, LoadedFile]:
        owner, file = self._file(name)
        if owner >= self.pg.size():
            raise UnknownTensorError(
                f"tensor {name!r} is in a file of rank {owner}, and there are {self.pg.size()} ranks",
                path=file.metadata.src,
                tensor=name,
            )
        if file.is_released:
            raise UnknownTensorError(
                f"tensor {name!r} is no longer there: all tensors of {file.metadata.src} were taken",
                path=file.metadata.src,
                tensor=name,
            )
        return owner, file

    def _file(self, name: str) -> tuple[int, LoadedFile]:
        if self._is_closed:
            raise ValueError("this buffer is closed")
        if name not in self.key_to_rank_lidx:
            raise UnknownTensorError(
                f"there is no tensor {name!r} in the files that were loaded", tensor=name
            )
        rank, number = self.key_to_rank_lidx[name]
        return rank, self.rank_loaders[rank][number]


def _shape_of_part(frames: Iterable[TensorFrame], dim: int, rank: int, ranks: int) -> list[int]:
    shape: list[int] = []
    size = 0
    for frame in frames:
        start, stop = shard(frame.shape[dim], 1, rank, ranks)
        size += stop - start
        shape = list(frame.shape)
    shape[dim] = size
    return shape


def _checked_dim(names: Sequence[str], frames: Sequence[TensorFrame], dim: int, ranks: int) -> int:
    """The dimension, counted from the first. Every rank comes to the same result: none is left waiting."""
    name, first = names[0], frames[0]
    if not -len(first.shape) <= dim < len(first.shape):
        raise SliceError(f"tensor {name!r} of shape {first.shape} has no dimension {dim}", tensor=name)
    dim %= len(first.shape)
    for other, frame in zip(names, frames, strict=True):
        # One rank's tensors of several types torch joins by itself; what travels is of one type.
        is_type_alike = ranks == 1 or frame.dtype is first.dtype
        others = [*frame.shape[:dim], first.shape[dim], *frame.shape[dim + 1 :]]
        if not (len(frame.shape) > dim and others == first.shape and is_type_alike):
            raise SliceError(
                f"tensors {name!r} and {other!r} cannot be joined along dimension {dim}: they are {first.dtype.value} "
                f"{first.shape} and {frame.dtype.value} {frame.shape}",
                tensor=other,
            )
        if frame.dtype is DType.F4 and dim == len(frame.shape) - 1 and -(-frame.shape[dim] // ranks) % 2:
            raise SliceError(
                f"{ranks} parts of dimension {dim} of tensor {other!r}, which has size {frame.shape[dim]}, would part "
                "pairs of F4 elements, which torch packs into one",
                tensor=other,
            )
    return dim
