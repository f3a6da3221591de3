"""The stores that `kv.py` measures: ours, and those of others as they are used in their hosts, each on eight threads.

One measurement is a fresh process: it stores blocks, or loads what another process stored, and prints a line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import random
import resource
import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

THREADS = 8
# Blocks of one call, where an engine takes several at once.
BATCH = 32
MADV_POPULATE_WRITE = 23


class Engine(Protocol):
    """A store that holds blocks of one size."""

    def store(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """Stores all blocks, and returns when the engine says that they are stored."""

    def load(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """Loads all blocks."""

    def close(self) -> None:
        """Writes down what is needed to open it again."""


def batches(
    keys: Sequence[str], blocks: Sequence[memoryview]
) -> Iterable[tuple[Sequence[str], Sequence[memoryview]]]:
    """Keys and blocks, some at a time."""
    for start in range(0, len(keys), BATCH):
        yield keys[start : start + BATCH], blocks[start : start + BATCH]


def on_threads(work: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> None:
    """Does all jobs on eight threads; the first error ends it."""
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda job: work(*job), jobs):
            pass


class Hoistway:
    """Our store, checksums on, its other options at their defaults but `durability`."""

    def __init__(self, root: Path, block_bytes: int, count: int, durability: str = "batched") -> None:
        import hoistway.kv  # noqa: PLC0415

        capacity = max(4 << 30, 3 * block_bytes * count)
        self._store = hoistway.kv.Store(
            root, capacity=capacity, min_free=0, durability=durability, io_threads=THREADS
        )
        self._blocks = self._store.namespace(model="benchmark", dtype="uint8", layout="opaque")

    def store(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """Batches, on eight threads."""
        on_threads(lambda *batch: self._wait(self._blocks.store(*batch)), batches(keys, blocks))
        self._store.flush()

    def load(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """Batches, on eight threads."""
        on_threads(lambda *batch: self._wait(self._blocks.load(*batch)), batches(keys, blocks))

    @staticmethod
    def _wait(ticket: Any) -> None:
        completion = ticket.wait()
        if not completion.ok:
            raise SystemExit(f"hoistway: {set(completion.statuses)}")

    def close(self) -> None:
        """Ends it."""
        self._store.close()


class VllmFs:
    """The functions of vLLM's tier `fs`: a file for each block, past the page cache, by its C extension."""

    def __init__(self, root: Path, block_bytes: int, count: int) -> None:
        from vllm.v1.kv_offload.tiering.fs import io  # noqa: PLC0415

        if not io._HAS_FSIO_C:
            raise SystemExit("vLLM's extension fs_io_C was not built")
        root.mkdir(exist_ok=True)
        self._io, self._root, self._block_bytes = io, root, block_bytes
        if not io.probe_o_direct(str(root)):
            raise SystemExit("no O_DIRECT here")

    def _paths(self, keys: Sequence[str]) -> list[str]:
        digests = [key.rsplit("@", 1)[1] for key in keys]
        return [f"{self._root}/{digest[:3]}/{digest[3:5]}_g0/{digest}.bin" for digest in digests]

    def _run(self, work: Callable[..., Any], keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        # As the tier does: offsets into one view of all its memory.
        whole = blocks[0].obj
        start = address_of(memoryview(whole))
        jobs = [
            (
                self._paths(some),
                memoryview(whole),
                [address_of(block) - start for block in views],
                self._block_bytes,
                True,
            )
            for some, views in batches(keys, blocks)
        ]
        on_threads(work, jobs)

    def store(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """As its thread pool does."""
        self._run(self._io.batch_store_block, keys, blocks)

    def load(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """As its thread pool does."""
        self._run(self._io.batch_load_block, keys, blocks)

    def close(self) -> None:
        """Holds nothing."""


class LmcacheFs:
    """LMCache's native client of files, with eight threads of its own, past the page cache."""

    def __init__(self, root: Path, block_bytes: int, count: int) -> None:
        import torch  # noqa: F401, PLC0415
        from lmcache.lmcache_fs import LMCacheFSClient  # noqa: PLC0415

        root.mkdir(exist_ok=True)
        self._client = LMCacheFSClient(str(root), THREADS, "", True, 0)

    def _run(self, submit: Callable[..., int], keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        waiting = {submit(list(some), list(views)) for some, views in batches(keys, blocks)}
        poll = select.poll()
        poll.register(self._client.event_fd(), select.POLLIN)
        while waiting:
            poll.poll(1000)
            for number, ok, error, each in self._client.drain_completions():
                if not ok or (each is not None and not all(each)):
                    raise SystemExit(f"LMCache: {error or each}")
                waiting.discard(number)

    def store(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """As its adapter does."""
        self._run(self._client.submit_batch_set, keys, blocks)

    def load(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """As its adapter does."""
        self._run(self._client.submit_batch_get, keys, blocks)

    def close(self) -> None:
        """Ends its threads."""
        self._client.close()


class LmcacheRawBlock:
    """LMCache's slots in one file, the closest relative of ours."""

    def __init__(self, root: Path, block_bytes: int, count: int, io_engine: str) -> None:
        import torch  # noqa: PLC0415
        from lmcache.v1.memory_management import MemoryFormat  # noqa: PLC0415
        from lmcache.v1.storage_backend.raw_block import core  # noqa: PLC0415
        from lmcache.v1.storage_backend.raw_block.key_codec import RawBlockKeySpec  # noqa: PLC0415

        root.mkdir(exist_ok=True)
        path, slot, metadata_bytes = root / "raw", block_bytes + 4096, 256 << 20
        capacity = metadata_bytes + slot * (count + 64)
        if not path.exists():
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, capacity)
        configuration = core.RawBlockCoreConfig(
            device_path=str(path),
            capacity_bytes=capacity,
            block_align=4096,
            header_bytes=4096,
            slot_bytes=slot,
            use_odirect=True,
            enable_zero_copy=True,
            meta_total_bytes=metadata_bytes,
            meta_magic=b"LMCIDX01",
            meta_version=1,
            meta_checkpoint_interval_sec=3600,
            meta_idle_quiet_ms=1000,
            meta_enable_periodic=False,
            meta_verify_on_load=False,
            io_engine=io_engine,
        )
        self._core = core.RawBlockCore(configuration, key_namespace="object")
        self._spec, self._format = RawBlockKeySpec, MemoryFormat.KV_2LTD
        self._shape = (torch.Size([block_bytes]), torch.uint8)

    def _object(self, block: memoryview) -> Any:
        shape, dtype = self._shape
        metadata = SimpleNamespace(shape=shape, dtype=dtype, cached_positions=None, fmt=self._format)
        return SimpleNamespace(byte_array=block, metadata=metadata, data_ptr=address_of(block))

    def _key(self, key: str) -> Any:
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return self._spec(key, int.from_bytes(digest, "big"))

    def store(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """Batches, on eight threads."""

        def put(some: Sequence[str], views: Sequence[memoryview]) -> None:
            found = self._core.put_many(
                [self._key(key) for key in some], [self._object(view) for view in views]
            )
            if not all(found.results):
                raise SystemExit("LMCache raw_block: not all blocks were stored")

        on_threads(put, batches(keys, blocks))

    def load(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """Batches, on eight threads."""

        def get(some: Sequence[str], views: Sequence[memoryview]) -> None:
            encoded = [self._key(key).encoded for key in some]
            if not all(self._core.load_many_into(encoded, [self._object(view) for view in views])):
                raise SystemExit("LMCache raw_block: not all blocks were loaded")

        on_threads(get, batches(keys, blocks))

    def close(self) -> None:
        """Writes its checkpoint."""
        self._core.checkpoint_now()
        self._core.close()


class Drive:
    """No store: writes and reads of one file past the page cache, block after block. The limit."""

    def __init__(self, root: Path, block_bytes: int, count: int, depth: int) -> None:
        root.mkdir(exist_ok=True)
        path = root / "blocks"
        is_new = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CREAT, 0o600)
        if is_new:
            os.posix_fallocate(self._file, 0, block_bytes * count)
        self._block_bytes, self._depth = block_bytes, depth
        self._offsets = {key: number * block_bytes for number, key in enumerate(keys_of(count))}

    def _run(self, transfer: Callable[..., int], keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        def move(key: str, block: memoryview) -> None:
            if transfer(self._file, [block], self._offsets[key]) != self._block_bytes:
                raise SystemExit("the drive moved less than a block")

        with ThreadPoolExecutor(self._depth) as pool:
            for _ in pool.map(move, keys, blocks):
                pass

    def store(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """Writes, and has the drive write its cache down."""
        self._run(os.pwritev, keys, blocks)
        os.fdatasync(self._file)

    def load(self, keys: Sequence[str], blocks: Sequence[memoryview]) -> None:
        """Reads."""
        self._run(os.preadv, keys, blocks)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


# Each under the name that results use.
ENGINES: dict[str, Callable[[Path, int, int], Engine]] = {
    "hoistway": Hoistway,
    "hoistway (none)": lambda *arguments: Hoistway(*arguments, durability="none"),
    "vLLM fs": VllmFs,
    "LMCache fs_native": LmcacheFs,
    "LMCache raw_block posix": lambda *arguments: LmcacheRawBlock(*arguments, io_engine="posix"),
    "LMCache raw_block io_uring": lambda *arguments: LmcacheRawBlock(*arguments, io_engine="io_uring"),
    "drive, 8 at once": lambda *arguments: Drive(*arguments, depth=8),
    "drive, 32 at once": lambda *arguments: Drive(*arguments, depth=32),
}


def address_of(view: memoryview) -> int:
    """Where a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def touched(length: int) -> memoryview:
    """Anonymous memory, aligned to pages, that was touched."""
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address_of(view)), ctypes.c_size_t(length), MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), "madvise")
    return view


def keys_of(count: int) -> list[str]:
    """The keys of all blocks, in the form of LMCache's, which its file client insists on."""
    return [
        f"benchmark@00000000@0@{hashlib.sha256(str(number).encode()).hexdigest()}" for number in range(count)
    ]


def contents(block_bytes: int, count: int) -> np.ndarray:
    """The bytes of all blocks: random, the same in every process."""
    return np.random.default_rng(7).integers(0, 256, (count, block_bytes), np.uint8)


def main() -> None:
    """Measures what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("phase", choices=["store", "load", "scattered"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--block-bytes", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    arguments = parser.parse_args()
    block_bytes, count = arguments.block_bytes, arguments.count
    memory = touched(block_bytes * count)
    blocks = [memory[number * block_bytes : (number + 1) * block_bytes] for number in range(count)]
    keys = keys_of(count)
    expected = contents(block_bytes, count)
    order = list(range(count))
    if arguments.phase == "scattered":
        # Blocks that were stored together are not asked for together.
        random.Random(7).shuffle(order)
    if arguments.phase == "store":
        np.copyto(np.frombuffer(memory, np.uint8).reshape(count, block_bytes), expected)
    started = time.perf_counter()
    engine = ENGINES[arguments.engine](arguments.root, block_bytes, count)
    opening = time.perf_counter() - started
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    if arguments.phase == "store":
        engine.store(keys, blocks)
    else:
        engine.load([keys[number] for number in order], [blocks[number] for number in order])
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    if not np.array_equal(np.frombuffer(memory, np.uint8).reshape(count, block_bytes), expected):
        raise SystemExit(f"{arguments.engine} delivered other bytes than were stored")
    engine.close()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    json.dump({"seconds": seconds, "opening": opening, "cpu_seconds": cpu}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
