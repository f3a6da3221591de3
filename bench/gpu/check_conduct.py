"""Checks of how loads behave beside others: memory, threads, streams, frameworks, reports and errors."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import hoistway
import numpy as np

from gpu import files
from gpu.driver import device, vendor
from gpu.subject import (
    DEVICE,
    TORCH_DEVICE,
    Check,
    SkipError,
    Subject,
    carriers,
    must_raise,
    on_threads,
    same_bytes,
)

MIB = 1 << 20
# What may be kept of the device's memory: others' and the driver's own, which come in pages of 2 MiB.
TOLERANCE = 32 * MIB
STAGING_LIMIT = 256 * MIB


def report_says_what_happened(subject: Subject) -> str:
    """The report's sums, the name of the device, and the memory for staging."""
    path = _model(subject)
    tensors = subject.load(path)
    report = tensors.report.as_dict()
    size = sum(len(tensor.data) for tensor in files.read(path).values())
    carried = sum(carrier["tensor_bytes"] for carrier in report["carriers"])
    assert report["tensor_bytes"] == carried == size, f"{carried} of {size} bytes carried, by the report"
    assert report["device"]["name"] == subject.driver.name(), (
        f"the device is called {report['device']['name']}"
    )
    assert report["memory"]["staging_bytes"] <= STAGING_LIMIT, (
        f"{report['memory']['staging_bytes']} bytes staging"
    )
    return carriers(tensors)


def memory_of_torchs_allocator(subject: Subject) -> str:
    """`allocator="torch"`: torch counts the memory, and has it back when the tensors are gone."""
    torch = subject.need_torch()
    path = _model(subject)
    size = sum(len(tensor.data) for tensor in files.read(path).values())
    before = torch.cuda.memory_allocated()
    tensors = subject.load(path, allocator="torch")
    grown = torch.cuda.memory_allocated() - before
    assert size <= grown <= 1.2 * size + 32 * MIB, f"torch counts {grown} bytes for {size}"
    subject.must_hold(tensors, path)
    del tensors
    gc.collect()
    kept = torch.cuda.memory_allocated() - before
    assert kept <= 0, f"torch still counts {kept} bytes"
    return f"{grown / MIB:.1f} MiB counted for {size / MIB:.1f} MiB"


def conversion_into_torchs_memory(subject: Subject) -> None:
    """`allocator="torch"` with a conversion, which takes scratch memory."""
    torch = subject.need_torch()
    path = _model(subject)
    wanted = subject.load(path, dtype="float32")
    found = subject.load(path, dtype="float32", allocator="torch")
    for name, tensor in wanted.items():
        assert torch.equal(tensor.isnan(), found[name].isnan()), f"{name}: NaNs differ"
        assert torch.equal(tensor.nan_to_num(), found[name].nan_to_num()), f"{name}: numbers differ"


def two_loads_at_once(subject: Subject) -> None:
    """Two threads that never used the device before, each with a load of its own, three times."""
    paths = [_model(subject, seed) for seed in (1, 2)]

    def load(path: Path) -> None:
        for _ in range(3):
            subject.must_hold(subject.load(path), path)

    on_threads(*(lambda path=path: load(path) for path in paths))


def tensors_outlive_everything(subject: Subject) -> None:
    """The checkpoint closed, other tensors of the load dropped, other memory taken: the rest stays what it is."""
    path = _model(subject)
    name = "layers.3.weight"
    with hoistway.open(path, device=DEVICE, framework=subject.framework) as checkpoint:
        tensors = checkpoint.load()
        tensor = tensors[name]
        alone = checkpoint.get_tensor(name)
    del checkpoint, tensors
    gc.collect()
    others = [subject.load(_model(subject, seed)) for seed in (1, 2)]
    for each in (tensor, alone):
        subject.must_equal(each, files.read(path)[name], name)
    assert all(others)


def device_memory_comes_back(subject: Subject) -> str:
    """As much is free after tensors were dropped as before the load."""
    path = _model(subject)
    subject.load(path)  # What is kept for the next load is no leak.
    gc.collect()
    before = subject.free_bytes()
    tensors = subject.load(path)
    taken = before - subject.free_bytes()
    size = path.stat().st_size
    assert taken >= size - TOLERANCE, f"{taken} bytes taken for tensors of {size}"
    del tensors
    gc.collect()
    missing = before - subject.free_bytes()
    assert missing <= TOLERANCE, f"{missing} bytes are missing"
    return f"{taken / MIB:.0f} MiB taken for {size / MIB:.0f} MiB, {missing / MIB:.0f} MiB missing afterwards"


def many_loads_leak_nothing(subject: Subject) -> str:
    """30 loads in a row, of which the first three may fill what is kept."""
    path = files.write(
        subject.folder / "leak.safetensors", {f"t{i}": ("BF16", [512, 1025 + i]) for i in range(8)}
    )

    def state() -> tuple[int, int, int]:
        gc.collect()
        return subject.free_bytes(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for turn in range(30):
        options: dict[str, Any] = {"dtype": "float32"} if turn % 3 == 1 else {}
        subject.load(path, **options)
        if turn == 2:
            before = state()
    after = state()
    assert before[0] - after[0] <= TOLERANCE, f"{before[0] - after[0]} bytes of the device were lost"
    assert after[1] <= before[1], f"{after[1] - before[1]} files were left open"
    assert after[2] <= before[2] + 2, f"{after[2] - before[2]} threads were left"
    return (
        f"{before[0] - after[0]} bytes, {after[1] - before[1]} files and {after[2] - before[2]} threads more"
    )


def tensors_as_they_arrive(subject: Subject) -> None:
    """Iterating: each tensor is complete on delivery, on a stream without synchronization."""
    path = _model(subject)
    stored = files.read(path)
    seen = set()
    with hoistway.open(path, device=DEVICE, framework=subject.framework) as checkpoint:
        for name, tensor in checkpoint:
            subject.must_equal(tensor, stored[name], name)
            seen.add(name)
    assert seen == set(stored), f"{set(stored) - seen} never came"


def consumer_on_a_side_stream(subject: Subject) -> str:
    """DLPack asks for a stream; what runs there sees the bytes, while the rest is still being loaded."""
    path = _model(subject)
    stored = files.read(path)
    copies: dict[str, Any] = {}
    with hoistway.open(path, device=DEVICE, framework="raw") as checkpoint:
        if subject.torch is not None:
            stream = subject.torch.cuda.Stream()
            with subject.torch.cuda.stream(stream):
                for name, tensor in checkpoint:
                    copies[name] = subject.torch.from_dlpack(tensor).reshape(-1).clone()
            stream.synchronize()
            found = {name: subject.bytes_of(copy) for name, copy in copies.items()}
            how = "torch"
        else:
            side = subject.driver.stream()
            for name, tensor in checkpoint:
                tensor.__dlpack__(stream=side.handle, max_version=(1, 0))
                copies[name] = np.zeros(tensor.nbytes, np.uint8)
                side.to_host(copies[name], tensor.data_ptr)
                side.synchronize()
            side.close()
            found = {name: copy.tobytes() for name, copy in copies.items()}
            how = "the driver"
    for name, wanted in stored.items():
        same_bytes(found[name], wanted.data, name)
    return f"a stream of {how}"


def jax_without_a_copy(subject: Subject) -> str:
    """Tensors of jax lie where they were loaded to."""
    jax = _framework("jax")
    try:
        jax.devices(vendor().kind)
    except RuntimeError as error:
        raise SkipError(f"jax does not see the device: {error}") from error
    path = _model(subject)
    for name, array in hoistway.load_file(path, DEVICE, framework="jax").items():
        same_bytes(np.asarray(array).tobytes(), files.read(path)[name].data, name)
    copied = []
    for name, tensor in hoistway.load_file(path, DEVICE, framework="raw", layout="tensor").items():
        address = tensor.data_ptr
        if jax.dlpack.from_dlpack(tensor).unsafe_buffer_pointer() != address:
            copied.append(name)
    assert not copied, f"jax copied {copied}"
    return "at the addresses that they were loaded to"


def cupy_by_dlpack(subject: Subject) -> None:
    """What cupy sees are the bytes of the file."""
    cupy = _framework("cupy")
    if subject.torch is None:
        raise SkipError("cupy cannot use the device either")
    path = files.write(subject.folder / "cupy.safetensors", {"a": ("F32", [1000, 33]), "b": ("I64", [7])})
    for name, tensor in hoistway.load_file(path, DEVICE, framework="raw").items():
        same_bytes(cupy.asnumpy(cupy.from_dlpack(tensor)).tobytes(), files.read(path)[name].data, name)


def context_still_works(subject: Subject) -> None:
    """The framework's context is current as before, and its own memory is as it was."""
    if subject.torch is None:
        memory, back = subject.driver.pinned(MIB), np.zeros(MIB, np.uint8)
        memory[:] = np.random.default_rng(3).integers(0, 256, MIB, np.uint8)
        address, stream = subject.driver.allocate(MIB), subject.driver.stream()
        stream.to_device(address, memory)
        stream.synchronize()
        before = subject.driver.current_context()
        subject.load(_model(subject))
        assert subject.driver.current_context() == before, "another context is current"
        stream.to_host(back, address)
        stream.synchronize()
        subject.driver.free(address)
        stream.close()
        assert np.array_equal(back, memory), "memory of others has changed"
        return
    torch = subject.torch
    matrix = torch.randn(512, 512, device=TORCH_DEVICE)
    product = matrix @ matrix
    before = subject.driver.current_context(), torch.cuda.current_device()
    subject.load(_model(subject))
    assert (subject.driver.current_context(), torch.cuda.current_device()) == before, (
        "another context is current"
    )
    assert torch.equal(matrix @ matrix, product), "memory of others has changed"
    torch.cuda.synchronize()


def second_device(subject: Subject) -> None:
    """Another device than the first."""
    if (count := subject.driver.device_count()) < 2:
        raise SkipError(f"there is {count} device")
    path = _model(subject)
    tensors = subject.load(path, device(1))
    subject.must_hold(tensors, path)
    assert tensors.report.as_dict()["device"]["device"] == device(1), "the report names another device"


def no_such_device(subject: Subject) -> str:
    """A number that no device has."""
    path = _model(subject)
    return str(must_raise(hoistway.errors.DeviceUnavailableError, lambda: subject.load(path, device(99))))


def truncated_file(subject: Subject) -> str:
    """Too short when it is opened, and when it is read."""
    content = _model(subject).read_bytes()
    path = subject.folder / "truncated.safetensors"
    path.write_bytes(content[: len(content) // 2])
    error = must_raise(hoistway.errors.TruncatedError, lambda: subject.load(path))
    path.write_bytes(content)
    with hoistway.open(path, device=DEVICE, framework=subject.framework) as checkpoint:
        os.truncate(path, len(content) // 2)
        later = must_raise(hoistway.HoistwayError, checkpoint.load)
    changed = hoistway.errors.TruncatedError, hoistway.errors.FileChangedError
    assert isinstance(later, changed), f"{type(later).__name__} of a file that became shorter: {later}"
    return f"{error}; {later}"


def more_than_is_free(subject: Subject) -> str:
    """A model larger than what is free: an error before anything is read or allocated."""
    path = _model(subject)
    subject.load(path)
    gc.collect()
    large = files.write_sparse(
        subject.folder / "sparse.safetensors", {"large": ("U8", [1024 * MIB], 1024 * MIB)}
    )
    ballast = subject.driver.allocate(subject.free_bytes() - 512 * MIB)
    try:
        free, read, started = subject.free_bytes(), _bytes_read(), time.perf_counter()
        error = must_raise(hoistway.errors.MemoryBudgetError, lambda: subject.load(large))
        seconds = time.perf_counter() - started
        gc.collect()
        assert _bytes_read() - read < 16 * MIB, f"{_bytes_read() - read} bytes were read first"
        assert abs(free - subject.free_bytes()) < TOLERANCE, "device memory was taken, and kept"
    finally:
        subject.driver.free(ballast)
        large.unlink()
    # The device is none the worse for it.
    subject.must_hold(subject.load(path), path)
    return f"after {seconds * 1000:.0f} ms: {error}"


def _model(subject: Subject, seed: int = 0) -> Path:
    path = subject.folder / f"model{seed}.safetensors"
    if not path.exists():
        tensors: dict[str, tuple[str, list[int]]] = {"embed": ("F32", [8000, 1024]), "scale": ("F16", [33])}
        for layer in range(8):
            tensors[f"layers.{layer}.weight"] = ("BF16", [2048, 2048 + layer])
            tensors[f"layers.{layer}.bias"] = ("BF16", [2048])
        files.write(path, tensors, seed=seed)
    return path


def _framework(name: str) -> Any:
    try:
        return __import__(name)
    except Exception as error:
        raise SkipError(f"{name}: {type(error).__name__}: {error}") from error


def _bytes_read() -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar:"))


CHECKS: list[Check] = [
    report_says_what_happened,
    memory_of_torchs_allocator,
    conversion_into_torchs_memory,
    two_loads_at_once,
    tensors_outlive_everything,
    device_memory_comes_back,
    many_loads_leak_nothing,
    tensors_as_they_arrive,
    consumer_on_a_side_stream,
    jax_without_a_copy,
    cupy_by_dlpack,
    context_still_works,
    second_device,
    no_such_device,
    truncated_file,
    more_than_is_free,
]
