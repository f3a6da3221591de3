"""Checks of what programs do with the device beside hoistway: captures, queued work, other threads, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, byref, c_int, c_size_t, c_uint64, c_void_p, create_string_buffer
from pathlib import Path
from typing import Any

import hoistway
from hoistway import experts, kv

from gpu import files
from gpu.driver import DriverError
from gpu.subject import DEVICE, Check, SkipError, Subject, on_threads, same_bytes

SECONDS = 60
GLOBAL_CAPTURE, RELAXED_CAPTURE = 0, 2
BLOCKING, NON_BLOCKING = 0, 1
TIMELESS_EVENT = 2
SIZE = 1 << 20
HostFunction = CFUNCTYPE(None, c_void_p)


def captures_stay_valid(subject: Subject) -> str:
    """Another thread captures while loads, saves, KV requests and expert leases run."""
    _need_cuda(subject)
    done = threading.Event()
    graphs = 0

    def capture() -> None:
        nonlocal graphs
        with _on_device(subject) as work:
            stream, memory = work.stream(NON_BLOCKING), work.memory(SIZE)
            while not done.is_set():
                work.replay(stream, memory)
                graphs += 1
            work.close(stream, memory)

    def use() -> None:
        try:
            subject.driver.enter()
            # For the calls of this check alone: hoistway's are relaxed anyway, and most are made by other threads.
            subject.driver.call("cuThreadExchangeStreamCaptureMode", byref(c_int(RELAXED_CAPTURE)))
            path = _model(subject)
            for dtype in (None, "float32"):
                tensors = subject.load(path, dtype=dtype)
            subject.must_hold(subject.load(path), path)
            hoistway.save_file(dict(tensors), subject.folder / "beside-saved.safetensors")
            _kv_round_trip(subject)
            _expert_leases(subject)
        finally:
            done.set()

    on_threads(capture, use)
    return f"{graphs} graphs"


def others_go_on_while_tensors_are_dropped(subject: Subject) -> None:
    """The work that the drop waits for ends only when another thread of Python runs."""
    _need_cuda(subject)
    tensors = subject.load(_model(subject))
    opened = threading.Event()
    with _on_device(subject) as work:
        stream = work.stream(NON_BLOCKING)
        # Longer than the drop takes, where other threads do not run.
        function = HostFunction(lambda _: opened.wait(SECONDS) and None)
        subject.driver.call("cuLaunchHostFunc", c_void_p(stream), function, None)
        other = threading.Timer(0.2, opened.set)
        other.start()
        started = time.monotonic()
        tensors.clear()
        took = time.monotonic() - started
        other.join()
        work.close(stream)
    assert took < SECONDS / 2, f"the drop took {took:.1f} s: other threads stood still"


def experts_on_the_device(subject: Subject) -> str:
    """Leases of a store whose slots are on the device, with evictions while work is queued: the bytes of each."""
    return _expert_leases(subject)


def experts_in_address_space(subject: Subject) -> str:
    """Leases of a store that maps stacked tensors by granules, with padding: the bytes of each at its stride."""
    _need_cuda(subject)
    return _expert_leases(subject, backing="device_sparse", pad=True, budget=8 << 20)


def reads_come_after_queued_work(subject: Subject) -> None:
    """A read to memory that queued work still uses.

    That is on the default stream, on a side stream in order with it, and on a named stream that is in order with none.
    """
    _need_cuda(subject)
    path = _model(subject)
    with _on_device(subject) as work, _chunks() as reader:
        alone = work.stream(NON_BLOCKING)
        for stream, named in ((0, None), (work.stream(BLOCKING), None), (alone, alone)):
            target, earlier = work.memory(SIZE, 1), work.memory(SIZE)
            function = HostFunction(lambda _: time.sleep(0.2))
            subject.driver.call("cuLaunchHostFunc", c_void_p(stream), function, None)
            work.copy(earlier, target, stream)
            assert reader.read(path, target, 0, SIZE, 0, named) == SIZE
            work.synchronize(stream)
            same_bytes(work.bytes_of(earlier), b"\x01" * SIZE, "what was queued before the read")
            same_bytes(work.bytes_of(target), path.read_bytes()[:SIZE], "what was read")
            work.close(stream, target, earlier)


def calls_wait_for_streams_in_no_order(subject: Subject) -> None:
    """A save has what is queued on a stream in no order with the default one, and ``copy_into`` comes after it."""
    _need_cuda(subject)
    path, saved = subject.folder / "side.safetensors", subject.folder / "side-saved.safetensors"
    files.write(path, {"bytes": ("U8", [SIZE])})
    tensor = hoistway.load_file(path, DEVICE, framework="raw")["bytes"]
    target = subject.device_bytes(SIZE, seed=3)
    before = target.tobytes()
    function = HostFunction(lambda _: time.sleep(0.3))
    with _on_device(subject) as work:
        stream, earlier = work.stream(NON_BLOCKING), work.memory(SIZE)
        subject.driver.call("cuLaunchHostFunc", c_void_p(stream), function, None)
        work.fill(tensor.data_ptr, 7, stream)
        hoistway.save_file({"bytes": tensor}, saved)
        same_bytes(files.read(saved)["bytes"].data, b"\x07" * SIZE, "what was saved")
        subject.driver.call("cuLaunchHostFunc", c_void_p(stream), function, None)
        work.copy(earlier, target.address, stream)
        with hoistway.open(path, framework="raw") as checkpoint:
            checkpoint.copy_into({"bytes": target})
        work.synchronize(stream)
        same_bytes(work.bytes_of(earlier), before, "what was queued before")
        same_bytes(target.tobytes(), files.read(path)["bytes"].data, "what was copied")
        work.close(stream, earlier)
    target.free()


def a_captured_event_is_told_from_others(subject: Subject) -> str:
    """Before a stream waits for a program's event, hoistway asks after it: no read becomes a part of a capture."""
    _need_cuda(subject)
    call, graph, event = subject.driver.call, c_void_p(), c_void_p()
    answers = set()

    def ask() -> None:
        subject.driver.enter()
        before = c_int(RELAXED_CAPTURE)
        call("cuThreadExchangeStreamCaptureMode", byref(before))
        try:
            call("cuEventQuery", event)
            answers.add("reached")
        except DriverError as error:
            answers.add(str(error))
        call("cuThreadExchangeStreamCaptureMode", byref(before))

    with _on_device(subject) as work:
        stream, memory = work.stream(NON_BLOCKING), work.memory(SIZE)
        call("cuEventCreate", byref(event), TIMELESS_EVENT)
        call("cuStreamBeginCapture_v2", c_void_p(stream), GLOBAL_CAPTURE)
        work.fill(memory, 7, stream)
        call("cuEventRecord", event, c_void_p(stream))
        # From this thread, and from another, as the threads of hoistway ask.
        ask()
        on_threads(ask)
        try:
            call("cuStreamEndCapture", c_void_p(stream), byref(graph))
            call("cuGraphDestroy", graph)
        except DriverError as error:
            answers.add(str(error))
        call("cuEventDestroy_v2", event)
        work.close(stream, memory)
    assert "reached" not in answers, "a stream that waits for the event becomes a part of the capture"
    return ", ".join(sorted(answers))


def layers_to_the_device(subject: Subject) -> str:
    """Layers that stream through less memory than they take: to the device, and to the host and on to the device."""
    path = _model(subject)
    wanted = files.read(path)
    room = max(len(stored.data) for stored in wanted.values())
    memory, copied = subject.device_bytes(room), 0
    for device, stream in (("cpu", None), (DEVICE, None), (DEVICE, 0)):
        options: dict[str, Any] = {"device": device, "stream": stream, "framework": "raw"}
        with hoistway.stream_layers(path, budget=4 * room, **options) as layers:
            for _ in range(2):
                for layer in layers:
                    for name, tensor in layer.items():
                        memory.write(tensor.tobytes())
                        same_bytes(memory.tobytes()[: tensor.nbytes], wanted[name].data, name)
                        copied += 1
                    del tensor
    memory.free()
    return f"{copied} tensors"


def first_use_of_kernels(subject: Subject) -> None:
    """A process whose first call is a conversion, on two threads."""
    _run(
        subject,
        """
        import sys, threading, hoistway
        load = lambda: hoistway.load_file(sys.argv[1], sys.argv[2], framework="raw", dtype="float32")
        other = threading.Thread(target=load)
        other.start()
        first = load()
        other.join()
        """,
    )


def fork_during_the_first_use(subject: Subject) -> None:
    """Children that are forked while the driver starts get an error, or the device, and never hang."""
    _run(
        subject,
        """
        import os, sys, threading, time, hoistway
        load = lambda: hoistway.load_file(sys.argv[1], sys.argv[2], framework="raw")
        other = threading.Thread(target=load)
        other.start()
        children = []
        while other.is_alive() and len(children) < 20:
            child = os.fork()
            if child == 0:
                try:
                    load()
                except hoistway.errors.DeviceUnavailableError:
                    pass
                os._exit(0)
            children.append(child)
            time.sleep(0.02)
        other.join()
        end = time.monotonic() + 30
        for child in children:
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                if time.monotonic() > end:
                    os.kill(child, 9)
                    raise SystemExit("a child hangs")
                time.sleep(0.01)
        load()
        """,
    )


def _need_cuda(subject: Subject) -> None:
    if subject.driver.vendor.kind != "cuda":
        raise SkipError("the functions are CUDA's")


def _run(subject: Subject, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(_model(subject)), DEVICE],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1:]


class _Work:
    """Calls of the driver by this thread."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def stream(self, flags: int) -> int:
        stream = c_void_p()
        self._call("create_stream", byref(stream), flags)
        return stream.value or 0

    def memory(self, size: int, value: int = 0) -> int:
        address = c_uint64()
        self._call("allocate", byref(address), size)
        self.fill(address.value, value, 0)
        self.synchronize(0)
        return address.value

    def fill(self, address: int, value: int, stream: int) -> None:
        self._call("cuMemsetD8Async", c_uint64(address), value, c_size_t(SIZE), c_void_p(stream))

    def copy(self, to: int, of: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", c_uint64(to), c_uint64(of), c_size_t(SIZE), c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        self._call("wait_for_stream", c_void_p(stream))

    def bytes_of(self, address: int) -> bytes:
        into = create_string_buffer(SIZE)
        self._call("cuMemcpyDtoH_v2", into, c_uint64(address), c_size_t(SIZE))
        return into.raw

    def replay(self, stream: int, memory: int) -> None:
        """Captures a fill, and launches it."""
        graph, executable = c_void_p(), c_void_p()
        self._call("cuStreamBeginCapture_v2", c_void_p(stream), GLOBAL_CAPTURE)
        self.fill(memory, 7, stream)
        # Time for other threads to break it.
        time.sleep(0.002)
        self._call("cuStreamEndCapture", c_void_p(stream), byref(graph))
        self._call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        self._call("cuGraphLaunch", executable, c_void_p(stream))
        self.synchronize(stream)
        self._call("cuGraphExecDestroy", executable)
        self._call("cuGraphDestroy", graph)

    def close(self, stream: int, *memory: int) -> None:
        if stream:
            self._call("destroy_stream", c_void_p(stream))
        for address in memory:
            self._call("free", address)


@contextmanager
def _on_device(subject: Subject) -> Iterator[_Work]:
    subject.driver.enter()
    yield _Work(subject.driver.call)


@contextmanager
def _chunks() -> Iterator[Any]:
    from hoistway import _native  # noqa: PLC0415  (what the readers of hoistway.compat.threefs are made of)

    reader = _native.ChunkReader(None, 4, 1 << 20, "auto", [])
    yield reader
    reader.close()


def _kv_round_trip(subject: Subject) -> None:
    stored, loaded = subject.device_bytes(SIZE, seed=5), subject.device_bytes(SIZE)
    store = kv.Store(subject.folder / "beside-kv", capacity="256MiB", segment_bytes="16MiB", min_free=0)
    blocks = store.namespace(model="beside")
    for _ in range(20):
        assert blocks.store([os.urandom(16)], [stored]).wait(SECONDS).ok
    assert blocks.store([b"key"], [stored]).wait(SECONDS).ok
    assert blocks.load([b"key"], [loaded]).wait(SECONDS).ok
    same_bytes(loaded.tobytes(), stored.tobytes(), "block")
    store.close()
    stored.free()
    loaded.free()


def _expert_leases(subject: Subject, **options: Any) -> str:
    """Leases of all experts twice, with room for a few."""
    path = subject.folder / "experts.safetensors"
    if not path.exists():
        parts = {
            f"model.layers.{layer}.mlp.experts.{name}": ("U8", [8, size])
            for layer in range(2)
            for name, size in (("gate_up_proj", 300_000), ("down_proj", 150_000))
        }
        files.write(path, parts)
    wanted = files.read(path)
    leases = 0
    options = options or {"budget": 4 * 451_072, "batch": 2 * 451_072, "dense": 0}
    with experts.ExpertStore.open(path, device=DEVICE, framework="raw", **options) as store:
        for layer in (0, 1, 0, 1):
            for first in range(0, 8, 2):
                with store.ensure(layer, [first, first + 1]) as lease:
                    for expert in (first, first + 1):
                        for tensor in lease[expert].values():
                            size = tensor.nbytes
                            name = tensor.name
                            data = wanted[name].data[expert * size : (expert + 1) * size]
                            same_bytes(tensor.tobytes(), data, f"{name}, expert {expert}")
                            base, stride = store.tensor_address(name), store.tensor_stride(name)
                            if options.get("backing") == "device_sparse":
                                assert base is not None, name
                                assert stride is not None, name
                            if base is not None and stride is not None:
                                assert tensor.data_ptr == base + expert * stride, f"{name}, expert {expert}"
                    leases += 1
    return f"{leases} leases"


def _model(subject: Subject) -> Path:
    path = subject.folder / "beside.safetensors"
    if not path.exists():
        tensors: dict[str, tuple[str, list[int]]] = {"embed": ("F32", [1000, 512])}
        for layer in range(4):
            tensors[f"layers.{layer}.weight"] = ("BF16", [1024, 2048 + layer])
        files.write(path, tensors)
    return path


CHECKS: list[Check] = [
    captures_stay_valid,
    others_go_on_while_tensors_are_dropped,
    experts_on_the_device,
    experts_in_address_space,
    reads_come_after_queued_work,
    calls_wait_for_streams_in_no_order,
    a_captured_event_is_told_from_others,
    layers_to_the_device,
    first_use_of_kernels,
    fork_during_the_first_use,
]
