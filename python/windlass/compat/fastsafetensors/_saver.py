"""`ParallelSaver`: tensors as a given number of files of about the same size."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import windlass
from windlass.compat.fastsafetensors._dtypes import DType
from windlass.compat.fastsafetensors._framework import TorchTensor, framework_of
from windlass.errors import OptionError, StorageError

# By these their readers tell whether files were saved together.
_INDEX, _COUNT, _SET = "fst.shard.index", "fst.shard.count", "fst.shard.set"


@dataclass
class WriteEntry:
    """A tensor to save."""

    name: str
    dtype: DType
    shape: list[int]
    nbytes: int
    source: Any = None


ShardMetadata = Callable[[Sequence[WriteEntry]], Mapping[str, str]]


class ParallelSaver:
    """Saves tensors as files ``BASE-00001-of-00016.safetensors`` and so on, each of which is whole or not there.

    Args:
        num_shards: How many files.
        framework: ``"pytorch"``.
        num_threads: Threads that write, for all files together.
        shard_metadata: Text for a file to carry, by what is in it.
        fill: Encoders of one's own are not possible here: an error if given.
        min_free_bytes: Space that is to be left over.
        fsync: Whether to wait until all is on the disk.
    """

    def __init__(
        self,
        *,
        num_shards: int = 16,
        framework: str = "pytorch",
        num_threads: int = 8,
        shard_metadata: ShardMetadata | None = None,
        fill: Any = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
    ) -> None:
        framework_of(framework)
        for name, count in (("num_shards", num_shards), ("num_threads", num_threads)):
            if count < 1:
                raise OptionError(f"{name} cannot be {count}: it is at least 1")
        if fill is not None:
            raise OptionError("fill cannot be given: windlass writes tensors as they are; encode them first")
        self.num_shards = num_shards
        self.num_threads = num_threads
        self.shard_metadata = shard_metadata
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
        """Saves tensors of torch, or wrapped ones, and returns the names of the files.

        Args:
            tensors: The tensors, largest of which go to the emptiest file first.
            base: What names begin with, directories included; these are made.
            metadata: Text for every file to carry.
            shard0_metadata: Text for the first file to carry.
            header_align: The data begins at a multiple of this: a power of two from 8.
        """
        entries = [_entry(name, tensor) for name, tensor in tensors.items()]
        shards: list[list[WriteEntry]] = [[] for _ in range(self.num_shards)]
        filled = [0] * self.num_shards
        for entry in sorted(entries, key=lambda entry: -entry.nbytes):
            emptiest = filled.index(min(filled))
            shards[emptiest].append(entry)
            filled[emptiest] += entry.nbytes
        texts = self._texts(shards, metadata or {}, shard0_metadata or {})
        self._check_space(base, sum(filled))
        count = self.num_shards
        paths = [f"{base}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        at_once = min(self.num_threads, count)

        def save_shard(number: int) -> None:
            windlass.save_file(
                {entry.name: entry.source for entry in shards[number]},
                paths[number],
                metadata=texts[number],
                sync=self.fsync,
                alignment=header_align,
                threads=max(1, self.num_threads // at_once),
            )

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(save_shard, range(count)))
        return paths

    def _texts(
        self, shards: Sequence[Sequence[WriteEntry]], metadata: Mapping[str, str], first: Mapping[str, str]
    ) -> list[dict[str, str]]:
        together = uuid.uuid4().hex
        texts = []
        for number, shard in enumerate(shards):
            extra = {} if self.shard_metadata is None else dict(self.shard_metadata(tuple(shard)))
            own = {_INDEX: str(number), _COUNT: str(len(shards)), _SET: together}
            if own.keys() & extra.keys():
                raise OptionError(
                    f"shard_metadata cannot have {min(own.keys() & extra.keys())!r}: it is set here"
                )
            texts.append({**metadata, **(first if number == 0 else {}), **own, **extra})
        return texts

    def _check_space(self, base: str, needed: int) -> None:
        directory = os.path.dirname(os.path.abspath(base))
        os.makedirs(directory, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if free < needed + self.min_free_bytes:
            raise StorageError(
                f"{directory} has {free} bytes left, too few for {needed} bytes of tensors and the "
                f"{self.min_free_bytes} bytes that are to be left over",
                path=directory,
            )


def _entry(name: str, tensor: Any) -> WriteEntry:
    wrapped = tensor if isinstance(tensor, TorchTensor) else TorchTensor.of(tensor)
    wrapped = wrapped.detach().contiguous()
    return WriteEntry(name, wrapped.dtype, wrapped.get_shape(), wrapped.get_nbytes(), wrapped.get_raw())
