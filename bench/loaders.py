"""Every way to load that the benchmark compares: ours and the peers', each with its settings.

A loader is prepared (imports, pools) before the clock starts, and returns tensors by name in private memory of
its process, or, for the lazy ones, views of the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Load = Callable[[list[str]], dict[str, Any]]


@dataclass(frozen=True)
class Loader:
    """One way to load."""

    name: str
    package: str
    setting: str
    prepare: Callable[[int], Load]
    """Given the bytes of memory to have touched in advance (0: none), returns the function that is timed."""
    environment: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False
    is_lazy: bool = False


def _hoistway(**options: Any) -> Callable[[int], Load]:
    def prepare(touched_bytes: int) -> Load:
        import hoistway  # noqa: PLC0415
        import torch  # noqa: F401, PLC0415

        pool = hoistway.MemoryPool(touched_bytes) if touched_bytes else None
        return lambda paths: hoistway.load_file(paths, pool=pool, **options)

    return prepare


def _safetensors(backend: str, clone: bool) -> Callable[[int], Load]:
    def prepare(touched_bytes: int) -> Load:
        import torch  # noqa: F401, PLC0415
        from safetensors.torch import load_file  # noqa: PLC0415

        _touch_heap(touched_bytes)

        def load(paths: list[str]) -> dict[str, Any]:
            tensors = {}
            for path in paths:
                for name, tensor in load_file(path, backend=backend).items():
                    tensors[name] = tensor.clone() if clone else tensor
            return tensors

        return load

    return prepare


def _fastsafetensors(touched_bytes: int) -> Load:
    import torch  # noqa: F401, PLC0415
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # noqa: PLC0415

    _touch_heap(touched_bytes)

    def load(paths: list[str]) -> dict[str, Any]:
        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: paths})
        files = loader.copy_files_to_device()
        tensors = {name: files.get_tensor(name) for name in loader.get_keys()}
        # Tensors hold the memory by themselves since 0.5.
        tensors["__keep_alive__"] = (loader, files)
        return tensors

    return load


def _runai(touched_bytes: int) -> Load:
    import torch  # noqa: F401, PLC0415
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    _touch_heap(touched_bytes)

    def load(paths: list[str]) -> dict[str, Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(paths, device="cpu")
            return dict(streamer.get_tensors())

    return load


def _touch_heap(touched_bytes: int) -> None:
    """Makes malloc's heap own memory that was touched: see `HEAP_ENVIRONMENT`."""
    if touched_bytes == 0:
        return
    import ctypes  # noqa: PLC0415

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    block = libc.malloc(touched_bytes)
    ctypes.memset(block, 1, touched_bytes)
    libc.free(block)


# A heap that never shrinks, serves blocks of any size, and asks for huge pages: the peers' large buffers then lie
# in memory that was touched before the clock started, in pages as large as ours.
HEAP_ENVIRONMENT = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.mmap_max=0",
            "glibc.malloc.top_pad=0",
            "glibc.malloc.trim_threshold=17179869184",
            "glibc.malloc.hugetlb=1",
            "glibc.malloc.arena_max=1",
        )
    )
}


def _runai_environment(**settings: str) -> dict[str, str]:
    # The default memory limit of the streamer is far above this model; its log level hides its banner.
    quiet = {"LOG_LEVEL": "ERROR", "LOG_TO_STDERR": "0"}
    return {f"RUNAI_STREAMER_{name}": value for name, value in {**quiet, **settings}.items()}


LOADERS = {
    loader.name: loader
    for loader in (
        Loader("hoistway", "hoistway", "default (auto)", _hoistway(), is_ours=True),
        Loader("hoistway_uring", "hoistway", "route io_uring", _hoistway(route="io_uring"), is_ours=True),
        Loader("hoistway_threads", "hoistway", "route threads", _hoistway(route="threads"), is_ours=True),
        Loader(
            "hoistway_buffered",
            "hoistway",
            "route threads, direct never",
            _hoistway(route="threads", direct="never"),
            is_ours=True,
        ),
        Loader("hoistway_numpy", "hoistway", "framework numpy", _hoistway(framework="numpy"), is_ours=True),
        Loader(
            "hoistway_mapped",
            "hoistway",
            "route mapped",
            _hoistway(route="mapped"),
            is_ours=True,
            is_lazy=True,
        ),
        Loader(
            "safetensors_mmap", "safetensors", "load_file", _safetensors("mmap", clone=False), is_lazy=True
        ),
        Loader("safetensors_clone", "safetensors", "load_file + clone", _safetensors("mmap", clone=True)),
        Loader("safetensors_pread", "safetensors", "backend pread", _safetensors("pread", clone=False)),
        Loader("fastsafetensors", "fastsafetensors", "default (O_DIRECT)", _fastsafetensors),
        Loader(
            "fastsafetensors_buffered",
            "fastsafetensors",
            "FASTSAFETENSORS_ODIRECT=0",
            _fastsafetensors,
            {"FASTSAFETENSORS_ODIRECT": "0"},
        ),
        Loader("runai", "runai-model-streamer", "default (O_DIRECT)", _runai, _runai_environment()),
        Loader(
            "runai_16", "runai-model-streamer", "CONCURRENCY=16", _runai, _runai_environment(CONCURRENCY="16")
        ),
        Loader(
            "runai_buffered",
            "runai-model-streamer",
            "FS_STRATEGY=io_uring_buffered",
            _runai,
            _runai_environment(FS_STRATEGY="io_uring_buffered"),
        ),
    )
}


def processor_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
