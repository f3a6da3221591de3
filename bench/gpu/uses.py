"""One use of hoistway beside what it is held against, in one process and in turn: a line of JSON for each side.

The model's files are warm. Each use says its sides by name, with what they took each time; what is missing is an error.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import limits as host
import numpy as np

from gpu import files
from gpu.driver import Driver, device
from gpu.limits import pinned_copies
from gpu.loaders import TORCH_DEVICE, UnavailableError
from gpu.process import answers, tell

MIB = 1 << 20
BLOCK = 64 << 10
# What KV requests have under way, as in a cache of a server.
REQUEST_BYTES, REQUESTS = 32 * MIB, 4
WRITE_BYTES, WRITERS = 4 * MIB, 8
READERS = 8
LAYERS, EXPERTS, TOP = 4, 32, 4
GRANULE_BYTES = 2 << 20
TURNS = 3

Side = dict[str, Any]
Sides = Iterator[tuple[str, Side]]


class Setting:
    """What uses have to work with."""

    def __init__(self, paths: list[str], folder: Path, size: int, has_torch: bool) -> None:
        self.paths, self.folder, self.bytes = paths, folder, size
        self.framework = "torch" if has_torch else "raw"
        if has_torch:
            import torch  # noqa: PLC0415

            torch.zeros(1, device=TORCH_DEVICE)
        self.driver = Driver()

    def load(self, paths: list[str] | None = None, **options: Any) -> Side:
        """One load to the device, which gives the memory back."""
        import hoistway  # noqa: PLC0415

        with timed() as side:
            tensors = hoistway.load_file(
                self.paths if paths is None else paths, device=device(), framework=self.framework, **options
            )
            self.driver.synchronize()
        side["bytes"] = tensors.report.tensor_bytes
        del tensors
        gc.collect()
        return side


@contextmanager
def timed() -> Iterator[Side]:
    """Seconds, and those of processors."""
    side: Side = {}
    used = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    yield side
    side["seconds"] = time.perf_counter() - started
    now = resource.getrusage(resource.RUSAGE_SELF)
    side["cpu_seconds"] = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def first_load(setting: Setting) -> Sides:
    """The first load of a process, and the second."""
    yield "first", setting.load()
    yield "second", setting.load()


def conversion(setting: Setting) -> Sides:
    """The first conversion of a process beside a plain load, and later ones."""
    setting.load()
    yield "plain", setting.load()
    yield "first", setting.load(dtype="float16")
    for _ in range(TURNS - 1):
        yield "plain", setting.load()
        yield "later", setting.load(dtype="float16")


def pieces(setting: Setting) -> Sides:
    """Staged pieces of 1 MiB and of 4 MiB."""
    setting.load(route="staged")
    for _ in range(TURNS):
        for name in ("1MiB", "4MiB"):
            yield name, setting.load(route="staged", chunk=name)


def large_model(setting: Setting) -> Sides:
    """A model of twice the size, and copies of as many bytes from pinned memory."""
    setting.load()
    for _ in range(2):
        yield "load", setting.load()
        yield "link", pinned_copies(setting.bytes, by_slots=False)


def largest_model(setting: Setting) -> Sides:
    """The same with a model of four times the size."""
    yield from large_model(setting)


def one_tensor(setting: Setting) -> Sides:
    """A tensor of 16 MiB, and the link's rate for pinned memory of that size."""
    import hoistway  # noqa: PLC0415

    size = 16 * MIB
    path = str(files.write(setting.folder / "one.safetensors", {"one": ("U8", [size])}))
    pinned, target = setting.driver.pinned(size), setting.driver.allocate(size)
    pinned[:] = 1
    stream = setting.driver.stream()
    with hoistway.open(path, device=device(), framework=setting.framework) as checkpoint:
        for turn in range(3 * TURNS):
            with timed() as side:
                tensor = checkpoint["one"]
                setting.driver.synchronize()
            del tensor
            gc.collect()
            # The first opens what the others use.
            if turn > 0:
                yield "tensor", side | {"bytes": size}
            with timed() as side:
                stream.to_device(target, pinned)
                stream.synchronize()
            if turn > 0:
                yield "link", side | {"bytes": size}
    setting.driver.free(target)


def kv_blocks(setting: Setting) -> Sides:
    """Blocks of 64 KiB between the drive and the device, and between the drive and the host."""
    for _, name, side in _kv(setting, BLOCK, {"host": "cpu", "device": device()}):
        yield name, side


def kv_large_blocks(setting: Setting) -> Sides:
    """Blocks of 1 MiB between the drive and the device, and as many bytes that the drive writes and reads directly."""
    path = setting.folder / "plain"
    for size, name, side in _kv(setting, MIB, {"device": device()}):
        yield name, side
        if name.startswith("store"):
            with timed() as plain:
                _write(path, size)
            yield "writes", plain | {"bytes": size}
        else:
            read = host.device([str(path)], READERS)
            yield "reads", {"seconds": read["seconds"], "bytes": read["bytes"]}
            path.unlink()


def _kv(setting: Setting, block: int, places: dict[str, str]) -> Iterator[tuple[int, str, Side]]:
    """Stores and loads, from and to memory of each place: their bytes, which of them it was, and what it took."""
    from hoistway import kv  # noqa: PLC0415

    count = max(REQUESTS, setting.bytes // 8 // block)
    order = np.random.default_rng(0).permutation(count)
    on_device, on_host = setting.driver.allocate(count * block), setting.driver.pinned(count * block)
    on_host[:] = 1
    start = {"host": on_host.ctypes.data, "device": on_device}
    each = max(1, min(REQUEST_BYTES // block, count // REQUESTS))
    for turn in range(2):
        for name, where in places.items():
            root = setting.folder / f"kv-{name}-{turn}"
            store = kv.Store(root, capacity=max(4 * count * block, 256 * MIB), min_free=0)
            try:
                blocks = store.namespace(model="bench")
                for move in ("store", "load"):
                    if move == "load":
                        files.make_cold([str(file) for file in root.rglob("*") if file.is_file()])
                    with timed() as side:
                        pending: list[Any] = []
                        for first in range(0, count, each):
                            some = order[first : first + each]
                            addresses = kv.Addresses(
                                [[start[name] + int(place) * block] for place in some], [block], device=where
                            )
                            keys = [f"{place}" for place in some]
                            pending.append(getattr(blocks, move)(keys, addresses))
                            if len(pending) == REQUESTS:
                                _done(pending.pop(0))
                        while pending:
                            _done(pending.pop(0))
                    yield count * block, f"{move} {name}", side | {"bytes": count * block}
            finally:
                store.close()
                shutil.rmtree(root, ignore_errors=True)
    setting.driver.free(on_device)


def _done(ticket: Any) -> None:
    if not ticket.wait(60).ok:
        raise OSError("a request of the KV store failed")


def save(setting: Setting) -> Sides:
    """A save from the device, and direct writes of the drive; both are synced."""
    import hoistway  # noqa: PLC0415

    tensors = dict(hoistway.load_file(setting.paths[:1], device=device(), framework=setting.framework))
    size = os.path.getsize(setting.paths[0])
    path = setting.folder / "saved.safetensors"
    for _ in range(2):
        with timed() as side:
            hoistway.save_file(tensors, path)
        yield "save", side | {"bytes": size}
        path.unlink()
        with timed() as side:
            _write(path, size)
        yield "writes", side | {"bytes": size}
        path.unlink()


def _write(path: Path, size: int) -> None:
    source = host.memory(WRITE_BYTES, touched=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
    os.posix_fallocate(descriptor, 0, size)
    host.on_threads(
        WRITERS,
        list(range(0, size // WRITE_BYTES * WRITE_BYTES, WRITE_BYTES)),
        lambda offset: os.pwrite(descriptor, source, offset),
    )
    os.fsync(descriptor)
    os.close(descriptor)


def layers(setting: Setting) -> Sides:
    """Layers that come to the device one after the other, beside a load of all."""
    import hoistway  # noqa: PLC0415

    # Nothing computes with the layers, so that any stream will do.
    options: dict[str, Any] = {"device": device(), "stream": 0, "framework": setting.framework}
    with hoistway.stream_layers(setting.paths, budget=setting.bytes // 4, **options) as stream:
        for turn in range(2):
            with timed() as side:
                for layer in stream:
                    del layer
                setting.driver.synchronize()
            if turn > 0:
                yield "layers", side | {"bytes": setting.bytes}
    yield "load", setting.load()


def experts(setting: Setting) -> Sides:
    """Experts in slots of the device and in its address space, of which a third fits: bytes read a second."""
    path, expert_bytes = _moe(setting)
    # Parts that are no whole granules are padded to one.
    is_padded = expert_bytes // 3 % GRANULE_BYTES != 0
    mapped_bytes = 3 * GRANULE_BYTES if is_padded else expert_bytes
    backings: dict[str, dict[str, Any]] = {
        "experts": {"backing": "device_slots"},
        "mapped": {
            "backing": "device_sparse",
            "budget": LAYERS * EXPERTS // 3 * mapped_bytes,
            "pad": is_padded,
        },
    }
    for name, options in backings.items():
        with _experts(setting, path, expert_bytes, **options) as store:
            before = store.stats()["bytes_read"]
            with timed() as side:
                _tokens(store, 16)
                setting.driver.synchronize()
            yield name, side | {"bytes": store.stats()["bytes_read"] - before}
    yield "load", setting.load([path])


def second_level(setting: Setting) -> Sides:
    """Experts that come from pinned host memory, and the link's rate for as many bytes."""
    path, expert_bytes = _moe(setting)
    with _experts(setting, path, expert_bytes, host_level=LAYERS * EXPERTS * expert_bytes) as store:
        for layer in range(LAYERS):
            for first in range(0, EXPERTS, TOP):
                with store.ensure(layer, list(range(first, first + TOP))):
                    pass
        before = store.stats()["host_level"]["bytes_copied"]
        with timed() as side:
            _tokens(store, 16)
            setting.driver.synchronize()
        copied = store.stats()["host_level"]["bytes_copied"] - before
    yield "experts", side | {"bytes": copied}
    yield "link", pinned_copies(copied, by_slots=False)


def _moe(setting: Setting) -> tuple[str, int]:
    """A mixture of experts of an eighth of the model's size, and the bytes of an expert."""
    length = max(64, int((setting.bytes / 8 / LAYERS / EXPERTS / 3 / 2) ** 0.5) // 64 * 64)
    if length >= 1024:
        # Parts are whole granules.
        length -= length % 1024
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": ("BF16", [length, length])
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for part in ("gate", "up", "down")
    }
    return str(files.write(setting.folder / "experts.safetensors", tensors)), 3 * 2 * length**2


def _experts(setting: Setting, path: str, expert_bytes: int, **options: Any) -> Any:
    """A store of experts, of which a third fits if the options do not say otherwise."""
    from hoistway.experts import ExpertStore  # noqa: PLC0415

    own = {"device": device(), "framework": setting.framework, "top_k": TOP, "policy": "lru"}
    own["budget"] = LAYERS * EXPERTS * expert_bytes // 3
    return ExpertStore.open(path, **own | options)


def _tokens(store: Any, count: int) -> None:
    generator = np.random.default_rng(0)
    for _ in range(count):
        for layer in range(LAYERS):
            chosen = [int(expert) for expert in generator.permutation(EXPERTS)[:TOP]]
            with store.ensure(layer, chosen):
                pass


USES: dict[str, Callable[[Setting], Sides]] = {
    use.__name__: use
    for use in (
        first_load,
        conversion,
        pieces,
        large_model,
        one_tensor,
        kv_blocks,
        save,
        kv_large_blocks,
        layers,
        experts,
        second_level,
        largest_model,
    )
}


def main() -> None:
    """Measures the use that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("use", choices=USES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--torch", action="store_true", help="torch can use the device")
    parser.add_argument("paths", nargs="+")
    arguments = parser.parse_args()
    lines = answers()
    size = sum(os.path.getsize(path) for path in arguments.paths)
    sides: dict[str, list[Side]] = {}
    try:
        setting = Setting(arguments.paths, arguments.folder, size, arguments.torch)
        for name, side in USES[arguments.use](setting):
            sides.setdefault(name, []).append(side)
    except UnavailableError as error:
        tell(lines, error=str(error))
    except Exception as error:
        tell(lines, error=f"{type(error).__name__}: {error}", is_failure=True)
    else:
        tell(lines, sides=sides)
    sys.stdout.flush()
    # What lies on the device goes with the process.
    os._exit(0)


if __name__ == "__main__":
    main()
