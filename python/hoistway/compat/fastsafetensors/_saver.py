"""`ParallelSaver`: tensors as a given number of files of about the same size."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from hoistway import _native
from hoistway._arguments import is_url
from hoistway._save import Described, describe, save_described, written_name
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._framework import TensorBase, framework_of
from hoistway.errors import FormatError, OptionError, StorageError

# By these their readers tell whether files were saved together.
_INDEX, _COUNT, _SET = "fst.shard.index", "fst.shard.count", "fst.shard.set"
# What buffers for encoders begin at multiples of.
_BUFFER_ALIGNMENT = 4096
_LONGEST_HEADER = 100_000_000
_THREADS = 8


@dataclass
class WriteEntry:
    """A tensor to save."""

    name: str
    dtype: DType
    shape: list[int]
    nbytes: int
    source: Any = None
    """The source of its bytes: a tensor, or the argument of a ``fill``."""


ShardMetadata = Callable[[Sequence[WriteEntry]], Mapping[str, str]]
Fill = Callable[[list[tuple[memoryview, WriteEntry]]], object]
"""Writes the bytes of all entries into their buffers, and keeps none of these."""


class ShardSetError(FormatError):
    """Files are not all those of one save, in their order."""


@dataclass
class ShardPlan:
    """A file to write."""

    path: str
    entries: list[WriteEntry]
    header: bytes
    """The start of the file: the length of its text, the text, and blanks."""
    offsets: dict[str, tuple[int, int]]
    """The start and the end of each tensor's bytes in the file."""
    total_bytes: int
    """Bytes of the file."""
    metadata: dict[str, str]
    """Text for the file to carry."""
    header_align: int


class ParallelSaver:
    """Saves tensors as files ``BASE-00001-of-00016.safetensors`` and so on, each of which is whole or not there.

    Args:
        num_shards: How many files.
        framework: ``"pytorch"`` or ``"paddle"``.
        num_threads: Threads that write, for all files together.
        shard_metadata: Text for a file to carry, by what is in it.
        fill: Writes the bytes of all entries into the buffers that it is called with, the largest first, in place of
            those of their tensors. The buffers lie in a file without a name beside the files that are saved, which
            takes as much room as these until they are complete.
        min_free_bytes: Space that is to be left over.
        fsync: Whether to wait until all is on the disk.
    """

    def __init__(
        self,
        *,
        num_shards: int = 16,
        framework: str = "pytorch",
        num_threads: int = _THREADS,
        shard_metadata: ShardMetadata | None = None,
        fill: Fill | None = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
    ) -> None:
        framework_of(framework)
        for name, count in (("num_shards", num_shards), ("num_threads", num_threads)):
            if count < 1:
                raise OptionError(f"{name} cannot be {count}: it must be at least 1")
        self.num_shards = num_shards
        self.framework = framework
        self.num_threads = num_threads
        self.shard_metadata = shard_metadata
        self.fill = fill
        self.min_free_bytes = min_free_bytes
        self.fsync = fsync

    def save(
        self,
        tensors: Mapping[str, Any],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Saves tensors of the framework, or wrapped ones, and returns the names of the files.

        Args:
            tensors: The tensors, largest of which go to the emptiest file first.
            base: What names begin with, directories included; these are made.
            metadata: Text for every file to carry.
            shard0_metadata: Text for the first file to carry.
            header_align: The data begins at a multiple of this, itself a multiple of 8.
        """
        entries = [plain_entry(name, tensor, framework=self.framework) for name, tensor in tensors.items()]
        return self.save_entries(
            entries, base, metadata=metadata, shard0_metadata=shard0_metadata, header_align=header_align
        )

    def save_entries(
        self,
        entries: Sequence[WriteEntry],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Saves entries whose types, shapes and sizes are known, and returns the names of the files.

        Args:
            entries: What to save. Without ``fill`` their sources are tensors, whose bytes are written.
            base: As for `save`, like all others.
            metadata: Text for every file to carry.
            shard0_metadata: Text for the first file to carry.
            header_align: The data begins at a multiple of this.
        """
        plans = plan_shards(
            entries,
            shard_paths(base, self.num_shards),
            metadata=metadata,
            shard0_metadata=shard0_metadata,
            shard_metadata=self.shard_metadata,
            header_align=header_align,
        )
        if self.fill is not None:
            return _filled_shards(plans, self.fill, self.min_free_bytes, self.fsync, self.num_threads)
        _check_sources(entries)
        _check_space(plans, self.min_free_bytes, copies=1)
        described = {entry.name: _described(entry, self.framework) for entry in entries}
        return _write(plans, described, self.fsync, self.num_threads)


def save_sharded(
    entries: Sequence[WriteEntry],
    base: str,
    *,
    num_shards: int = 16,
    fill: Fill | None = None,
    framework: str = "pytorch",
    min_free_bytes: int = 0,
    fsync: bool = False,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadata | None = None,
    header_align: int = 8,
) -> list[str]:
    """Saves entries in one call, as `ParallelSaver.save_entries` does, and returns the names of the files."""
    saver = ParallelSaver(
        num_shards=num_shards,
        framework=framework,
        shard_metadata=shard_metadata,
        fill=fill,
        min_free_bytes=min_free_bytes,
        fsync=fsync,
    )
    return saver.save_entries(
        entries, base, metadata=metadata, shard0_metadata=shard0_metadata, header_align=header_align
    )


def plan_shards(
    entries: Sequence[WriteEntry],
    paths: Sequence[str],
    *,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadata | None = None,
    header_align: int = 8,
) -> list[ShardPlan]:
    """Shares entries out to files, the largest first and to the emptiest file. Writes nothing.

    Args:
        entries: What to save.
        paths: The files.
        metadata: As for `ParallelSaver.save`.
        shard0_metadata: As for `ParallelSaver.save`.
        shard_metadata: As for `ParallelSaver`.
        header_align: As for `ParallelSaver.save`.
    """
    if any(is_url(os.fspath(path)) for path in paths):
        raise OptionError(
            "paths cannot have a URL: this module saves to paths; use hoistway.save_sharded, which saves to s3:// and gs://"
        )
    if not paths or len(set(map(os.path.abspath, paths))) != len(paths):
        raise OptionError(f"paths cannot be {list(paths)}: name at least one path, and each once")
    if not 8 <= header_align <= _LONGEST_HEADER or header_align % 8:
        raise OptionError(
            f"header_align cannot be {header_align}: it must be a multiple of 8, up to {_LONGEST_HEADER}"
        )
    _check(entries)
    shards: list[list[WriteEntry]] = [[] for _ in paths]
    filled = [0] * len(paths)
    for entry in sorted(entries, key=lambda entry: -entry.nbytes):
        emptiest = filled.index(min(filled))
        shards[emptiest].append(entry)
        filled[emptiest] += entry.nbytes
    together = uuid.uuid4().hex
    plans = []
    for number, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        extra = {} if shard_metadata is None else dict(shard_metadata(tuple(shard)))
        own = {_INDEX: str(number), _COUNT: str(len(paths)), _SET: together}
        if own.keys() & extra.keys():
            raise OptionError(
                f"shard_metadata cannot have {min(own.keys() & extra.keys())!r}: it is set here"
            )
        first = shard0_metadata if number == 0 else None
        texts = {**(metadata or {}), **(first or {}), **own, **extra}
        for key, value in texts.items():
            if not (isinstance(key, str) and isinstance(value, str)):
                raise OptionError(f"metadata cannot have {key!r} with the value {value!r}: both are text")
        plans.append(_planned(path, shard, texts, header_align))
    return plans


def _planned(path: str, entries: list[WriteEntry], texts: dict[str, str], header_align: int) -> ShardPlan:
    shapes = [(entry.name, entry.dtype.value, entry.shape) for entry in entries]
    header, ranges, length = _native.plan_file(shapes, texts, alignment=header_align)
    offsets = dict(zip((entry.name for entry in entries), ranges, strict=True))
    return ShardPlan(path, entries, header, offsets, length, texts, header_align)


def write_shards(
    plans: Sequence[ShardPlan], fill: Fill, *, min_free_bytes: int = 0, fsync: bool = False
) -> list[str]:
    """Writes planned files with what ``fill`` writes into the buffers of their entries, and returns their names.

    Args:
        plans: What `plan_shards` gave.
        fill: As for `ParallelSaver`, like all others.
        min_free_bytes: Space that is to be left over.
        fsync: Whether to wait until all is on the disk.
    """
    return _filled_shards(plans, fill, min_free_bytes, fsync, _THREADS)


def _filled_shards(
    plans: Sequence[ShardPlan], fill: Fill, min_free_bytes: int, fsync: bool, threads: int
) -> list[str]:
    if not plans:
        return []
    # The buffers take as much room as the files.
    _check_space(plans, min_free_bytes, copies=2)
    entries = [entry for plan in plans for entry in plan.entries]
    with _filled(entries, fill, os.path.dirname(os.path.abspath(plans[0].path))) as described:
        return _write(plans, described, fsync, threads)


def _write(
    plans: Sequence[ShardPlan], described: Mapping[str, Described], fsync: bool, threads: int
) -> list[str]:
    at_once = min(threads, len(plans))

    def write_shard(plan: ShardPlan) -> None:
        save_described(
            [described[entry.name] for entry in plan.entries],
            plan.path,
            plan.metadata,
            sync=fsync,
            alignment=plan.header_align,
            threads=max(1, threads // at_once),
        )

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(write_shard, plans))
    return [plan.path for plan in plans]


def _check_space(plans: Sequence[ShardPlan], min_free_bytes: int, copies: int) -> None:
    needed = copies * sum(plan.total_bytes for plan in plans)
    for directory in {os.path.dirname(os.path.abspath(plan.path)) for plan in plans}:
        os.makedirs(directory, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if free < needed + min_free_bytes:
            raise StorageError(
                f"{directory} has {free} bytes left, too few for the {needed} bytes that the save takes and the "
                f"{min_free_bytes} bytes that are to be left over",
                path=directory,
            )


def plain_entry(name: str, tensor: Any, *, framework: str = "pytorch") -> WriteEntry:
    """Returns the entry of a tensor as it is."""
    wrapped = _wrapped(tensor, framework)
    return WriteEntry(name, wrapped.dtype, wrapped.get_shape(), wrapped.get_nbytes(), tensor)


def shard_paths(base: str, num_shards: int) -> list[str]:
    """Returns the names of that many files of one save."""
    if num_shards < 1:
        raise OptionError(f"num_shards cannot be {num_shards}: it must be at least 1")
    return [f"{base}-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def per_entry_fill(fn: Callable[[memoryview, WriteEntry], object], num_threads: int = 8) -> Fill:
    """Returns a ``fill`` that calls a function with each buffer and its entry, on that many threads."""
    if num_threads < 1:
        raise OptionError(f"num_threads cannot be {num_threads}: it must be at least 1")

    def fill(work: list[tuple[memoryview, WriteEntry]]) -> None:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda pair: fn(*pair), work))

    return fill


def tensor_fill(num_threads: int = 8, *, framework: str = "pytorch") -> Fill:
    """Returns a ``fill`` that writes the tensors that are the entries' sources."""

    def copy(buffer: memoryview, entry: WriteEntry) -> None:
        _wrapped(entry.source, framework).copy_to_buffer(buffer)

    return per_entry_fill(copy, num_threads)


def validate_shard_set(metas: Sequence[Any]) -> None:
    """Fails unless these are the headers of all files of one save, in their order."""
    if not metas:
        raise ShardSetError("there are no files")
    sets = set()
    for number, meta in enumerate(metas):
        texts = meta.metadata if isinstance(meta.metadata, dict) else {}
        found = texts.get(_INDEX), texts.get(_COUNT)
        if found != (str(number), str(len(metas))):
            index, count = found
            raise ShardSetError(
                f"{meta.src}: is file {index} of {count} of a save, not {number} of {len(metas)}",
                path=meta.src,
            )
        sets.add(texts.get(_SET))
    if len(sets) != 1 or None in sets:
        raise ShardSetError(f"the files are of several saves: {', '.join(sorted(map(str, sets)))}")


def _wrapped(tensor: Any, framework: str) -> TensorBase:
    if isinstance(tensor, TensorBase):
        return tensor
    wrapped: TensorBase = framework_of(framework).wrap_tensor(tensor)
    return wrapped


def _check(entries: Sequence[WriteEntry]) -> None:
    """Fails before anything is written, if entries are not what files can hold together."""
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise OptionError(
                f"tensor {entry.name!r} cannot be saved: the name is given twice", tensor=entry.name
            )
        names.add(written_name(entry.name))
        if entry.name == "__metadata__":
            raise OptionError(
                "tensor '__metadata__' cannot be saved: files keep that name", tensor=entry.name
            )
        if entry.dtype is DType.AUTO:
            raise OptionError(f"tensor {entry.name!r} cannot be saved: AUTO is no type", tensor=entry.name)
        if entry.dtype is DType.F4 and (not entry.shape or entry.shape[-1] % 2):
            raise OptionError(
                f"tensor {entry.name!r} cannot be saved: F4 needs an even last dimension, not {entry.shape}",
                tensor=entry.name,
            )
        needed = entry.dtype.bits
        for size in entry.shape:
            needed *= size
        if min(entry.shape, default=0) < 0 or needed != entry.nbytes * 8:
            raise OptionError(
                f"tensor {entry.name!r} cannot be saved: type {entry.dtype.value} and shape {entry.shape} do not make "
                f"{entry.nbytes} bytes",
                tensor=entry.name,
            )


def _check_sources(entries: Sequence[WriteEntry]) -> None:
    for entry in entries:
        if entry.source is None:
            raise OptionError(
                f"tensor {entry.name!r} cannot be saved: it has no source; give one, or a fill",
                tensor=entry.name,
            )


def _described(entry: WriteEntry, framework: str) -> Described:
    """The bytes of an entry's tensor, with the entry's type and shape."""
    tensor = _wrapped(entry.source, framework).detach().contiguous()
    described = describe(entry.name, tensor.get_raw())
    return described._replace(dtype=entry.dtype.value, shape=tuple(entry.shape))


@contextmanager
def _filled(entries: Sequence[WriteEntry], fill: Fill, directory: str) -> Iterator[dict[str, Described]]:
    """The bytes that a ``fill`` writes for entries, in a file that is gone afterwards."""
    offsets: dict[str, int] = {}
    length = 0
    for entry in entries:
        offsets[entry.name] = length
        length += -(-entry.nbytes // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
    with tempfile.TemporaryFile(dir=directory) as file:
        # Of a page that the file system has no room for, a write to memory kills the process.
        if sys.platform == "win32":
            file.truncate(max(length, 1))
        else:
            os.posix_fallocate(file.fileno(), 0, max(length, 1))
        memory = mmap.mmap(file.fileno(), max(length, 1))
        view = memoryview(memory)
        with _given_back(memory.close), _given_back(view.release):
            work = [
                (view[offsets[entry.name] : offsets[entry.name] + entry.nbytes], entry)
                for entry in sorted(entries, key=lambda entry: -entry.nbytes)
            ]
            with ExitStack() as given:
                for buffer, _ in work:
                    given.enter_context(_given_back(buffer.release))
                fill(work)
            # The mapping outlives what is yielded, so nothing else has to keep it.
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            yield {
                entry.name: Described(
                    entry.name,
                    entry.dtype.value,
                    tuple(entry.shape),
                    address + offsets[entry.name],
                    entry.nbytes,
                    "cpu",
                    None,
                )
                for entry in entries
            }


@contextmanager
def _given_back(give_back: Callable[[], None]) -> Iterator[None]:
    """Gives memory back at the end. After an error, whose traceback may hold what looks at it, it goes with that."""
    try:
        yield
    except BaseException:
        with suppress(BufferError):
            give_back()
        raise
    give_back()
