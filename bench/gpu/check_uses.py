"""Checks of what stands on loads: KV blocks, readers, targets of the caller's, fastsafetensors' copiers, and NCCL."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hoistway
from hoistway import kv
from hoistway.compat import threefs

from gpu import files
from gpu.driver import vendor
from gpu.subject import (
    BLOCK,
    DEVICE,
    Check,
    DeviceBytes,
    SkipError,
    Subject,
    carriers,
    on_threads,
    same_bytes,
)

MIB = 1 << 20
SECONDS = 60
COPY_ROUTES = ("auto", "staged", "threads", "io_uring")


def kv_blocks(direct: bool | str) -> Check:
    """A check of blocks that go from the device to a store and back, by way of the host or directly."""

    def check(subject: Subject) -> str:
        # The last is no multiple of a block, and the second none of a word.
        sizes = [MIB, 300_001, BLOCK, 2 * MIB + 8]
        with _store(subject, direct) as (store, blocks):
            sources = [subject.device_bytes(size, seed=number) for number, size in enumerate(sizes)]
            targets = [subject.device_bytes(size) for size in sizes]
            regions = [store.register(each) for each in (*sources, *targets)] if direct else []
            keys = [f"block {number}" for number in range(len(sizes))]
            for key, source, target in zip(keys, sources, targets, strict=True):
                missed = blocks.load([key], [target]).wait(SECONDS)
                assert missed.statuses == ["miss"], f"{key}: {missed.statuses} before it was stored"
                assert blocks.store([key], [source]).wait(SECONDS).ok, f"{key} was not stored"
                assert blocks.load([key], [target]).wait(SECONDS).ok, f"{key} was not loaded"
                same_bytes(target.tobytes(), source.tobytes(), key)
                host = bytearray(source.size)
                assert blocks.load([key], [host]).wait(SECONDS).ok, f"{key} was not loaded to the host"
                same_bytes(bytes(host), source.tobytes(), f"{key} on the host")
            _pieces(blocks, sources[0], targets[0])
            loads = [
                blocks.load([key], [target]).wait(SECONDS) for key, target in zip(keys, targets, strict=True)
            ]
            carried = {way for loaded in loads for way in loaded.carried}
            refused = sorted({refusal["what"] for refusal in store.report()["refused"]})
            is_direct = bool(regions) and all(region.is_direct for region in regions)
            assert not is_direct or "gds direct" in carried, f"registered memory was loaded by {carried}"
            del regions
            for each in (*sources, *targets):
                each.free()
        how = "registered memory is direct" if is_direct else "by way of the host"
        return f"{how}; {', '.join(sorted(carried))}" + (
            f"; refused: {', '.join(refused)}" if refused else ""
        )

    check.__name__ = f"kv_blocks_{'direct' if direct else 'staged'}"
    return check


def _pieces(blocks: kv.Namespace, source: DeviceBytes, target: DeviceBytes) -> None:
    """A block whose pieces lie apart, and come back to other places."""
    lengths = [1000, 5000]
    gathered = kv.Addresses([[source.address + 3, source.address + 200_000]], lengths, device=DEVICE)
    scattered = kv.Addresses([[target.address + 70_001, target.address + 8]], lengths, device=DEVICE)
    assert blocks.store(["pieces"], gathered).wait(SECONDS).ok
    assert blocks.load(["pieces"], scattered).wait(SECONDS).ok
    stored, found = source.tobytes(), target.tobytes()
    same_bytes(found[70_001:71_001], stored[3:1003], "the first piece")
    same_bytes(found[8:5008], stored[200_000:205_000], "the second piece")


@contextmanager
def _store(subject: Subject, direct: bool | str) -> Iterator[tuple[kv.Store, kv.Namespace]]:
    root = subject.folder / "kv"
    options: dict[str, Any] = {"capacity": "256MiB", "segment_bytes": "16MiB", "min_free": 0}
    store = kv.Store(root, direct=direct, **options)
    try:
        yield store, store.namespace(model="check")
    finally:
        store.close()
        shutil.rmtree(root)


def reader_of_chunks(subject: Subject) -> None:
    """Parts of a file at any address of the device, by two threads at once; and its header."""
    path = files.write(
        subject.folder / "reader.safetensors", {"a": ("U8", [9 * MIB + 7]), "b": ("F32", [33])}
    )
    content = path.read_bytes()
    files.make_cold([str(path)])
    reader = threefs.MockFileReader()

    def read(start: int, length: int, skew: int) -> None:
        subject.driver.enter()
        memory = subject.device_bytes(length + skew)
        count = reader.read_chunked(str(path), memory.address + skew, start, length, MIB, True)
        assert count == length, f"{count} of {length} bytes were read"
        same_bytes(memory.tobytes()[skew:], content[start : start + length], f"bytes from {start} on")
        memory.free()

    try:
        on_threads(
            lambda: read(0, len(content), 0),
            lambda: read(4097, 5 * MIB, 3),
        )
        text, start, size = reader.read_headers_batch([str(path)])[str(path)]
        assert (text.encode(), size) == (content[8:start], len(content)), "another header"
    finally:
        reader.close()


def copy_into(route: str) -> Check:
    """A check of targets on the device that the caller has: whole tensors, rows and columns."""

    def check(subject: Subject) -> str:
        path = files.write(
            subject.folder / "into.safetensors",
            {"large": ("U8", [5 * MIB + 1]), "matrix": ("U8", [1537, 1026]), "one": ("U8", [1])},
            padding=5,
        )
        stored = files.read(path)
        files.make_cold([str(path)])
        index = (slice(9, 1500), slice(5, 700))
        parts = {
            "large": stored["large"].data,
            "matrix": stored["matrix"].sliced(index),
            "one": stored["one"].data,
        }
        targets = {name: subject.device_bytes(len(data)) for name, data in parts.items()}
        with hoistway.open(path, framework="raw") as checkpoint:
            try:
                report = checkpoint.copy_into(targets, slices={"matrix": index}, route=route)
            except hoistway.errors.RouteUnavailableError as error:
                raise SkipError(str(error)) from error
        for name, data in parts.items():
            same_bytes(targets[name].tobytes(), data, name)
            targets[name].free()
        return ", ".join(f"{way.route} {way.access} via {way.via}" for way in report.carriers)

    check.__name__ = f"copy_into_{route}"
    return check


def copier(name: str) -> Check:
    """A check of a copier of fastsafetensors, as its users name it."""

    def check(subject: Subject) -> str:
        torch = subject.need_torch()
        from hoistway.compat import fastsafetensors  # noqa: PLC0415  (it needs torch)

        path = _model(subject)
        files.make_cold([str(path)])
        loader = fastsafetensors.SafeTensorsFileLoader(None, DEVICE, copier_type=name)
        loader.add_filenames({0: [str(path)]})
        before = torch.cuda.memory_allocated()
        try:
            buffer = loader.copy_files_to_device()
        except hoistway.errors.RouteUnavailableError as error:
            raise SkipError(str(error)) from error
        finally:
            loader.close()
        for tensor, wanted in files.read(path).items():
            subject.must_equal(buffer.get_tensor(tensor), wanted, tensor)
        ways = ", ".join(f"{way.route} {way.access}" for way in buffer.report.carriers)
        buffer.close()
        kept = torch.cuda.memory_allocated() - before
        assert kept <= 0, f"torch still counts {kept} bytes"
        return ways

    check.__name__ = f"copier_{name}"
    return check


def nccl_with_one_rank(subject: Subject) -> str:
    """`hoistway.distributed` in a group of NCCL's, whose notes and tensors travel by the device."""
    torch = subject.need_torch()
    dist = torch.distributed
    if not (dist.is_available() and dist.is_nccl_available()):
        raise SkipError("torch comes without NCCL")
    from hoistway import distributed  # noqa: PLC0415  (it needs torch)

    path = _model(subject)
    rendezvous = subject.folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", world_size=1, rank=0)
    try:
        for strategy in ("own", "share", "auto"):
            shards = {"*.weight": 0}
            found = distributed.load_file(path, DEVICE, strategy=strategy, shards=shards, timeout=SECONDS)
            subject.must_hold(found, path)
        with distributed.iter_tensors(path, DEVICE, timeout=SECONDS) as tensors:
            subject.must_hold(dict(tensors), path)
        # NCCL takes the tensors where they lie.
        tensor = found["layers.0.weight"]
        wanted = tensor.clone()
        dist.broadcast(tensor, 0)
        torch.cuda.synchronize()
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), "NCCL changed the tensor"
    finally:
        dist.destroy_process_group()
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def _model(subject: Subject) -> Path:
    path = subject.folder / "uses.safetensors"
    if not path.exists():
        tensors: dict[str, tuple[str, list[int]]] = {"embed": ("F32", [1000, 512]), "scale": ("F16", [33])}
        for layer in range(4):
            tensors[f"layers.{layer}.weight"] = ("BF16", [1024, 2048 + layer])
        files.write(path, tensors)
    return path


# Calls of a driver that take long, or hold others up. A small load that finds what an earlier one has left makes none
# of them. No streams are kept for HIP.
LONG_CALLS = {
    "cuda": (
        "cuStreamCreate",
        "cuStreamDestroy_v2",
        "cuMemGetInfo_v2",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
    ),
    "rocm": ("hipMemGetInfo", "hipHostRegister", "hipHostUnregister"),
}
# For so long hoistway keeps what nothing uses.
KEPT_SECONDS = 5


def a_small_load_makes_few_calls(subject: Subject) -> str:
    """The second load of one tensor of 16 MiB uses the stream and the pinned memory of the first."""
    path = files.write(subject.folder / "few.safetensors", {"one": ("U8", [16 << 20])})
    names = LONG_CALLS[vendor().kind]
    for _ in range(5):
        gc.collect()
        # What earlier checks have left would be given back meanwhile.
        hoistway.release_devices()
        started = time.monotonic()
        first = subject.load(path, threads=8)
        before = {name: subject.driver.calls_of(name) for name in names}
        if None in before.values():
            raise SkipError("the driver does not count calls")
        second = subject.load(path, threads=8)
        made = {name: (subject.driver.calls_of(name) or 0) - (before[name] or 0) for name in names}
        # Else what the first has left may be gone.
        if time.monotonic() - started < KEPT_SECONDS:
            assert not any(made.values()), f"{made} calls"
            subject.must_hold(first, path)
            subject.must_hold(second, path)
            return carriers(second)
    raise SkipError("loads take too long here")


CHECKS: list[Check] = [
    kv_blocks(direct=False),
    kv_blocks(direct="prefer"),
    reader_of_chunks,
    *(copy_into(route) for route in COPY_ROUTES),
    *(copier(name) for name in ("gds", "nogds", "unified")),
    nccl_with_one_rank,
    a_small_load_makes_few_calls,
]
