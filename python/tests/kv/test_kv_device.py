"""Blocks from and to devices: those of the stand-in driver."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import OpenStore, StandIn, random_bytes
from hoistway import kv
from interrupting import wait_until


class DeviceMemory:
    """Bytes of a device, as other libraries show them."""

    dlpack_type = 2

    def __init__(self, library: ctypes.CDLL, device: int, size: int) -> None:
        self.library, self.device, self.size = library, device, size
        self._context = ctypes.c_void_p()
        assert library.cuInit(0) == 0
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device) == 0
        address = ctypes.c_uint64()
        with self:
            assert library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        self.address = address.value

    def __enter__(self) -> DeviceMemory:
        assert self.library.cuCtxPushCurrent_v2(self._context) == 0
        return self

    def __exit__(self, *_: object) -> None:
        assert self.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0

    def write(self, data: bytes) -> None:
        with self:
            assert (
                self.library.cuMemcpyHtoD_v2(ctypes.c_uint64(self.address), data, ctypes.c_size_t(len(data)))
                == 0
            )

    def read(self) -> bytes:
        data = ctypes.create_string_buffer(self.size)
        with self:
            assert (
                self.library.cuMemcpyDtoH_v2(data, ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
                == 0
            )
        return data.raw

    def free(self) -> None:
        with self:
            assert self.library.cuMemFree_v2(ctypes.c_uint64(self.address)) == 0
        assert self.library.cuDevicePrimaryCtxRelease_v2(self.device) == 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.dlpack_type, self.device)


class HipMemory(DeviceMemory):
    """The same by the names of ROCm's runtime."""

    dlpack_type = 10

    def __init__(self, library: ctypes.CDLL, device: int, size: int) -> None:
        self.library, self.device, self.size = library, device, size
        assert library.hipInit(0) == 0
        address = ctypes.c_uint64()
        with self:
            assert library.hipMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        self.address = address.value

    def __enter__(self) -> HipMemory:
        assert self.library.hipSetDevice(self.device) == 0
        return self

    def __exit__(self, *_: object) -> None:
        assert self.library.hipSetDevice(0) == 0

    def write(self, data: bytes) -> None:
        # Memory that is not pinned has been read, and written, when these return.
        with self:
            size = ctypes.c_size_t(len(data))
            assert self.library.hipMemcpyHtoDAsync(ctypes.c_uint64(self.address), data, size, None) == 0
            assert self.library.hipDeviceSynchronize() == 0

    def read(self) -> bytes:
        data, size = ctypes.create_string_buffer(self.size), ctypes.c_size_t(self.size)
        with self:
            assert self.library.hipMemcpyDtoHAsync(data, ctypes.c_uint64(self.address), size, None) == 0
        return data.raw

    def free(self) -> None:
        with self:
            assert self.library.hipFree(ctypes.c_uint64(self.address)) == 0


@pytest.fixture
def allocate(stand_in: StandIn) -> Iterator[Callable[[int, int], DeviceMemory]]:
    allocated: list[DeviceMemory] = []

    def allocate(device: int, size: int) -> DeviceMemory:
        allocated.append(DeviceMemory(stand_in.library, device, size))
        return allocated[-1]

    yield allocate
    for memory in allocated:
        memory.free()


@pytest.fixture
def allocate_hip(stand_in: StandIn) -> Iterator[Callable[[int, int], DeviceMemory]]:
    allocated: list[DeviceMemory] = []

    def allocate(device: int, size: int) -> DeviceMemory:
        allocated.append(HipMemory(stand_in.library, device, size))
        return allocated[-1]

    yield allocate
    for memory in allocated:
        memory.free()


def test_managed_memory_of_cuda_is_a_devices(
    open_store: OpenStore, allocate: Callable[[int, int], DeviceMemory]
) -> None:
    """DLPack has a type of its own for it."""
    source, target = allocate(1, 5000), allocate(1, 5000)
    for memory in (source, target):
        memory.dlpack_type = 13
    data = bytes(random_bytes(5000))
    source.write(data)
    with open_store(direct=False) as store:
        blocks = store.namespace(model="test")
        assert blocks.store(["managed"], [source]).wait(30).ok
        assert blocks.load(["managed"], [target]).wait(30).ok
    assert target.read() == data


@pytest.mark.parametrize("direct", [False, "prefer"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_blocks_of_a_device(
    open_store: OpenStore,
    request: pytest.FixtureRequest,
    kind: str,
    device: int,
    direct: bool | str,
) -> None:
    fixture = "allocate_hip" if kind == "rocm" else "allocate"
    allocate: Callable[[int, int], DeviceMemory] = request.getfixturevalue(fixture)
    with open_store(direct=direct) as store:
        blocks = store.namespace(model="test")
        data = bytes(random_bytes(300_000))
        source, target = allocate(device, len(data)), allocate(device, len(data))
        source.write(data)
        assert blocks.store(["array"], [source]).wait(30).ok
        assert blocks.load(["array"], [target]).wait(30).ok
        assert target.read() == data
        host = bytearray(len(data))
        assert blocks.load(["array"], [host]).wait(30).ok
        assert host == data
        pieces = kv.Addresses(
            [[source.address, source.address + 200_000]], [1000, 5000], device=f"{kind}:{device}"
        )
        assert blocks.store(["pieces"], pieces).wait(30).ok
        host = bytearray(6000)
        assert blocks.load(["pieces"], [host]).wait(30).ok
        assert host == data[:1000] + data[200_000:205_000]


def test_registered_memory_of_a_device(
    open_store: OpenStore, allocate: Callable[[int, int], DeviceMemory]
) -> None:
    with open_store() as store:
        blocks = store.namespace(model="test")
        data = bytes(random_bytes(1 << 20))
        source, target = allocate(0, len(data)), allocate(0, len(data))
        source.write(data)
        regions = [store.register(source), store.register(target)]
        # cuFile keeps the mode that it had for the first test of this process.
        is_direct = all(region.is_direct for region in regions)
        assert is_direct or "gds" in {refusal["what"] for refusal in store.report()["refused"]}
        stored = blocks.store(["a"], [source]).wait(30)
        loaded = blocks.load(["a"], [target]).wait(30)
        assert stored.ok
        assert loaded.ok
        assert target.read() == data
        assert "gds direct" not in loaded.carried, (
            "the stand-in's memory does not begin at a multiple of 4096"
        )
        assert loaded.bounced_bytes == len(data)
        aligned = kv.Addresses([(source.address + 4095) & ~4095], 8192, device="cuda:0")
        stored = blocks.store(["aligned"], aligned).wait(30)
        assert stored.ok
        assert (stored.carried.get("gds direct", 0), stored.bounced_bytes) == (
            (8192, 0) if is_direct else (0, 8192)
        )
        assert not store.register(bytearray(4096)).is_direct
        del regions


def test_arrays_that_say_too_little_are_refused(blocks: kv.Namespace) -> None:
    class Array:
        def __init__(self, **interface: Any) -> None:
            self.__cuda_array_interface__ = {
                "typestr": "|u1",
                "shape": (4,),
                "data": (4096, False),
                **interface,
            }

    class OnDevice(Array):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    for wrong, why in [
        (Array(), "__dlpack_device__"),
        (OnDevice(strides=(8,)), "contiguous"),
        (OnDevice(data=(4096, True)), "read-only"),
        (OnDevice(typestr="?"), "size in bytes"),
        (OnDevice(shape=(1 << 40, 1 << 40)), "size in bytes"),
    ]:
        with pytest.raises((TypeError, BufferError), match=f"buffer 0: .*{why}"):
            blocks.load(["a"], [wrong])


# What follows needs requests that take as long as a test wants: a device that copies slowly.
@pytest.fixture
def slow(
    open_store: OpenStore, stand_in: StandIn, allocate: Callable[[int, int], DeviceMemory]
) -> Iterator[Callable[[float], kv.Ticket]]:
    """Starts a load that takes about so many seconds."""
    store = open_store(direct=False)
    blocks = store.namespace(model="slow")
    assert blocks.store(["a"], [random_bytes(1 << 20)]).wait(30).ok

    def start(seconds: float, **options: Any) -> kv.Ticket:
        target = allocate(0, 1 << 20)
        stand_in.set(f"COPY_LATENCY_US={int(seconds * 1e6)}")
        return blocks.load(["a"], [target], **options)

    yield start
    # Ends what copies wait for.
    stand_in.library.fake_cuda_reset()
    store.close()


def test_a_wait_has_an_end_and_the_request_goes_on(slow: Callable[..., kv.Ticket], stand_in: StandIn) -> None:
    ticket = slow(600)
    with pytest.raises(kv.WaitTimeoutError, match="within") as timeout:
        ticket.wait(0.05)
    assert isinstance(timeout.value, TimeoutError)
    assert not ticket.done()
    assert "under way" in repr(ticket)
    # The copy ends with this.
    stand_in.library.fake_cuda_reset()
    assert ticket.wait(60).ok


def test_a_request_that_takes_too_long_keeps_its_memory(
    slow: Callable[..., kv.Ticket], stand_in: StandIn
) -> None:
    timeout = 0.2
    while True:
        ticket = slow(600, timeout=timeout)
        assert ticket.wait(60).statuses == ["timed_out"]
        if not ticket.released():
            break
        # Its time was over before the device began.
        timeout *= 2
        assert timeout < 60
    # The copy ends with this.
    stand_in.library.fake_cuda_reset()
    wait_until(ticket.released)


def test_a_request_can_be_given_up(slow: Callable[..., kv.Ticket], stand_in: StandIn) -> None:
    ticket = slow(600)
    assert ticket.cancel()
    assert not ticket.cancel()
    assert ticket.wait(60).statuses == ["cancelled"]
    # The copy ends with this.
    stand_in.library.fake_cuda_reset()
    wait_until(ticket.released)


def is_in_wait(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code is kv.Ticket.wait.__code__


def test_ctrl_c_ends_a_wait_and_not_the_request(slow: Callable[..., kv.Ticket], stand_in: StandIn) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        wait_until(lambda: is_in_wait(main))
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ticket = slow(600)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        assert not ticket.done()
        interrupting.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    stand_in.library.fake_cuda_reset()
    assert ticket.wait(30).ok


def test_other_threads_run_during_a_wait(slow: Callable[..., kv.Ticket], stand_in: StandIn) -> None:
    ticket = slow(600)
    waiting = threading.Thread(target=ticket.wait)
    waiting.start()
    assert waiting.ident is not None
    wait_until(lambda: is_in_wait(waiting.ident or 0))
    for _ in range(20):
        assert not ticket.done()
        time.sleep(0.001)
    # The copy ends with this, and the wait with the copy.
    stand_in.library.fake_cuda_reset()
    waiting.join()
    assert ticket.done()


def test_an_event_loop_runs_during_a_wait(slow: Callable[..., kv.Ticket], stand_in: StandIn) -> None:
    async def main(notify: bool) -> None:
        ticket = slow(600, notify=notify)

        async def end() -> None:
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not ticket.done()
            # The copy ends with this, and the wait with the copy.
            stand_in.library.fake_cuda_reset()

        ending = asyncio.create_task(end())
        assert (await ticket).ok
        await ending

    asyncio.run(main(True))
    asyncio.run(main(False))


def test_the_completion_of_a_wait_that_was_given_up_is_not_kept(
    open_store: OpenStore, stand_in: StandIn, allocate: Callable[[int, int], DeviceMemory]
) -> None:
    async def give_up(ticket: kv.Ticket) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ticket, 0.05)

    async def ask(ticket: kv.Ticket) -> kv.Completion:
        return await ticket

    with open_store(direct=False) as store:
        blocks = store.namespace(model="slow")
        assert blocks.store(["a"], [random_bytes(1 << 20)]).wait(30).ok
        stand_in.set("COPY_LATENCY_US=600000000")
        try:
            ticket = blocks.load(["a"], [allocate(0, 1 << 20)], notify=True)
            asyncio.run(give_up(ticket))
        finally:
            # The copy ends with this.
            stand_in.library.fake_cuda_reset()
        assert select.select([store.event_fd()], [], [], 30)[0], "it ends without a waiting thread"
        assert store.drain_completions() == []
        assert asyncio.run(ask(ticket)).ok, "who asks again is told"


def test_a_store_that_is_closed_ends_what_is_under_way(
    open_store: OpenStore, stand_in: StandIn, allocate: Callable[[int, int], DeviceMemory]
) -> None:
    store = open_store(direct=False)
    blocks = store.namespace(model="slow")
    blocks.store(["a"], [random_bytes(1 << 20)]).wait(30)
    target = allocate(0, 1 << 20)
    stand_in.set("COPY_LATENCY_US=500000")
    ticket = blocks.load(["a"], [target])
    store.close()
    assert ticket.done()
    assert ticket.wait(1).statuses[0] in ("cancelled", "ok")
    assert ticket.released(), "close waits for the memory"


def test_an_event_holds_a_store_back_until_the_memory_is_written(
    open_store: OpenStore, stand_in: StandIn, allocate: Callable[[int, int], DeviceMemory]
) -> None:
    library = stand_in.library
    with open_store(direct=False) as store:
        blocks = store.namespace(model="test")
        data = bytes(random_bytes(1 << 20))
        source = allocate(0, len(data))
        source.write(bytes(len(data)))
        stand_in.set("COPY_LATENCY_US=300000")
        pinned = np.frombuffer(data, np.uint8).copy()
        stream, event = ctypes.c_void_p(), ctypes.c_void_p()
        with source:
            assert library.cuStreamCreate(ctypes.byref(stream), 1) == 0
            assert library.cuEventCreate(ctypes.byref(event), 2) == 0
            address = ctypes.c_void_p(pinned.ctypes.data)
            copied = library.cuMemcpyHtoDAsync_v2(
                ctypes.c_uint64(source.address), address, ctypes.c_size_t(len(data)), stream
            )
            assert copied == 0
            assert library.cuEventRecord(event, stream) == 0
        assert event.value
        assert blocks.store(["a"], [source], wait_event=event.value).wait(30).ok
        found = bytearray(len(data))
        assert blocks.load(["a"], [found]).wait(30).ok
        assert found == data
        with source:
            assert library.cuStreamSynchronize(stream) == 0
            assert library.cuEventDestroy_v2(event) == library.cuStreamDestroy_v2(stream) == 0
