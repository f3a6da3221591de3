"""What programs do with a device beside hoistway: threads, queued work, captures, forks, memory of torch's."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import textwrap
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hoistway
import pytest
import torch
from conftest import STAND_IN, StandIn, run, same_bytes, write_model
from device_work import Array, Captured, Work
from hoistway import errors, experts, kv
from hoistway._frameworks import torch_allocator
from hoistway.compat.fastsafetensors._copiers import load_options
from hoistway.compat.fastsafetensors._devices import Device
from interrupting import wait_until

TESTS = Path(__file__).parent
DEFAULT = types.SimpleNamespace(cuda_stream=0)
PREPARE = """
    import ctypes, os, sys, threading, time
    sys.path.insert(0, sys.argv[1])
    import hoistway
    from device_work import Array, Work
    from interrupting import wait_until
    library = ctypes.CDLL(sys.argv[2])
    library.fake_cuda_count.restype = ctypes.c_uint64
    count = lambda name: library.fake_cuda_count(name.encode())
"""


def run_beside(script: str, *arguments: object, **environment: str) -> None:
    """Runs a script in a new interpreter, which may hang: then the test fails."""
    done = run(textwrap.dedent(PREPARE) + textwrap.dedent(script), TESTS, STAND_IN, *arguments, **environment)
    assert done.returncode == 0, done.stderr


class Lent:
    """What owns memory that an allocator gave."""

    def __init__(self, work: Work, address: int) -> None:
        weakref.finalize(self, work.free, address)


@pytest.fixture
def work(stand_in: StandIn) -> Any:
    with Work(stand_in.library) as work:
        yield work


class TypedArray:
    """Memory of a device that holds 32-bit floats."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": "<f4",
            "data": (address, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def take_over(capsule: Any) -> Any:
    """The deleter of a capsule's tensor, called as consumers do: with the interpreter held, outside of hoistway."""
    api = ctypes.PyDLL(None)
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    managed = api.PyCapsule_GetPointer(capsule, b"dltensor")
    api.PyCapsule_SetName(capsule, b"used_dltensor")
    # Behind the tensor and the context.
    deleter = ctypes.c_void_p.from_address(managed + 56).value
    return lambda: ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(deleter)(managed)


def test_a_deleter_gives_memory_of_others_back_at_once(
    model: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = []

    def allocate(size: int) -> tuple[int, int, Any]:
        address = work.memory(size)
        owner = Lent(work, address)
        alive.append(weakref.ref(owner))
        return address, 0, owner

    monkeypatch.setattr("hoistway._checkpoint.torch_allocator", lambda _device: allocate)
    tensors = hoistway.load_file(model, "cuda", framework="raw", allocator="torch", layout="tensor")
    deleters = [take_over(tensor.__dlpack__()) for tensor in tensors.values()]
    del tensors
    assert len(alive) > 1
    assert all(owner() is not None for owner in alive)
    for deleter in deleters:
        deleter()
    assert all(owner() is None for owner in alive), "without another call of hoistway"


def test_tensors_in_memory_of_torchs_are_views_of_it(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So streams can be recorded for them, and the memory is torch's again when they are gone."""
    path = write_model(
        tmp_path / "m.safetensors",
        {
            "a": ("BF16", [512, 64]),
            "b": ("F8_E4M3", [33]),
            "c": ("I64", []),
            "d": ("BOOL", [5]),
            "e": ("U8", [7]),
        },
    )
    owners: list[torch.Tensor] = []
    addresses = []

    def allocate(size: int) -> tuple[int, int, Any]:
        # Torch has no device here, so what owns the memory is not where that is.
        owners.append(torch.zeros(size, dtype=torch.uint8))
        addresses.append(work.memory(size))
        return addresses[-1], 0, owners[-1]

    monkeypatch.setattr("hoistway._checkpoint.torch_allocator", lambda _device: allocate)
    expected = hoistway.load_file(path)
    tensors = hoistway.load_file(path, "cuda", allocator="torch")
    storages = {owner.untyped_storage().data_ptr() for owner in owners}
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert tensor.untyped_storage().data_ptr() in storages
    # To write to one is nothing that autograd would find in another.
    tensors["c"].zero_()
    assert [tensor._version for tensor in tensors.values()].count(0) == len(tensors) - 1
    # What the device holds at their places are their bytes.
    for owner, address in zip(owners, addresses, strict=True):
        owner.copy_(torch.frombuffer(bytearray(work.read(address, len(owner))), dtype=torch.uint8))
    assert all(same_bytes(tensors[name], expected[name]) for name in expected)
    alive = [weakref.ref(owner) for owner in owners]
    owners.clear()
    del tensors, tensor, owner
    assert all(owner() is None for owner in alive), "without another call of hoistway"
    for address in addresses:
        work.free(address)


def test_the_unified_copier_asks_for_no_memory_of_torchs() -> None:
    assert "allocator" not in load_options("unified", Device.of("cuda:0"), None, {})
    assert load_options("nogds", Device.of("cuda:0"), None, {})["allocator"] == "torch"


def test_tensors_are_dropped_while_other_threads_go_on(model: Path) -> None:
    """The work that the drop waits for ends only when another thread of Python runs."""
    run_beside(
        """
        tensors = hoistway.load_file(sys.argv[3], "cuda", framework="raw")
        shared = [tensor.__dlpack__() for tensor in hoistway.load_file(sys.argv[3], "cuda", framework="raw").values()]
        for drop in (tensors.clear, shared.clear):
            with Work(library) as work:
                gate = work.gate(work.stream())
                before = count("calls.cuMemFree_v2")
                def go_on():
                    wait_until(lambda: count("calls.cuMemFree_v2") > before)
                    gate.open()
                other = threading.Thread(target=go_on)
                other.start()
                drop()
                other.join()
        assert count("calls_under_interpreter") == 0
        """,
        model,
    )


def test_no_call_of_the_driver_holds_the_interpreter(tmp_path: Path) -> None:
    run_beside(
        """
        from hoistway import _native, kv
        tensors = hoistway.load_file(sys.argv[3], "cuda", framework="raw", dtype="float16")
        tensors["embed"].tobytes(), tensors["embed"].__dlpack__(), repr(tensors["embed"])
        hoistway.doctor()
        with hoistway.open(sys.argv[3], device="cuda", framework="raw") as checkpoint:
            bytes_ = checkpoint["bytes"]
            own = Array(bytes_.data_ptr, bytes_.nbytes)
            checkpoint.copy_into({"bytes": own})
            dict(checkpoint)
        hoistway.save_file({"bytes": bytes_}, sys.argv[4])
        hoistway.save({"bytes": bytes_})
        reader = _native.ChunkReader(None, 4, 1 << 20, "auto", [])
        reader.read(sys.argv[3], bytes_.data_ptr, 0, 4096, 0)
        del reader
        store = kv.Store(sys.argv[5], capacity="256MiB", segment_bytes="16MiB", min_free=0)
        blocks = store.namespace(model="test")
        assert blocks.store(["key"], [own]).wait(30).ok
        assert blocks.load(["key"], [own]).wait(30).ok
        store.close()
        del tensors, checkpoint, bytes_, store, blocks
        hoistway.release_devices()
        assert count("calls.cuMemFree_v2") > 0
        assert count("calls_under_interpreter") == 0
        """,
        write_model(tmp_path / "m.safetensors", {"embed": ("F32", [100, 64]), "bytes": ("U8", [1 << 16])}),
        tmp_path / "saved.safetensors",
        tmp_path / "store",
    )


def test_a_call_of_the_driver_that_holds_the_interpreter_is_counted() -> None:
    """What the tests above rely on: such calls of hoistway's would be seen."""
    run_beside(
        """
        version = ctypes.c_int()
        assert library.cuDriverGetVersion(ctypes.byref(version)) == 0
        assert count("calls_under_interpreter") == 0
        assert ctypes.PyDLL(sys.argv[2]).cuDriverGetVersion(ctypes.byref(version)) == 0
        assert count("calls_under_interpreter") == 1
        """
    )


def test_captures_of_another_thread_stay_valid(model: Path, work: Work, tmp_path: Path) -> None:
    expected = hoistway.load_file(model, framework="raw")
    path = write_model(tmp_path / "bytes.safetensors", {"bytes": ("U8", [1 << 16])})
    with Captured(work):
        # The first conversion loads kernels.
        tensors = hoistway.load_file(model, "cuda", framework="raw", dtype="float16")
        tensors = hoistway.load_file(model, "cuda", framework="raw")
        assert all(tensors[name].tobytes() == expected[name].tobytes() for name in expected)
        with hoistway.open(path, device="cuda", framework="raw") as checkpoint:
            own = checkpoint["bytes"]
            checkpoint.copy_into({"bytes": Array(own.data_ptr, own.nbytes)})
        hoistway.save_file({"embed": tensors["embed"]}, tmp_path / "saved.safetensors")
        read_chunk(model, own.data_ptr, 4096)
        store = kv.Store(tmp_path / "store", capacity="256MiB", segment_bytes="16MiB", min_free=0)
        blocks = store.namespace(model="test")
        array = Array(own.data_ptr, own.nbytes)
        assert blocks.store(["key"], [array]).wait(30).ok
        assert blocks.load(["key"], [array]).wait(30).ok
        store.close()
        del tensors, own, checkpoint, array, blocks, store
        gc.collect()
        hoistway.release_devices()
    saved = hoistway.load_file(tmp_path / "saved.safetensors", framework="raw")
    assert saved["embed"].tobytes() == expected["embed"].tobytes()


@pytest.mark.parametrize(
    "call",
    [
        "cuMemAlloc_v2",
        "cuMemHostRegister_v2",
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuModuleLoadData",
        "cuEventRecord",
        "cuMemcpyHtoDAsync_v2",
        "cuMemFree_v2",
    ],
)
def test_what_is_refused_because_of_a_capture_is_asked_again(
    model: Path, stand_in: StandIn, call: str
) -> None:
    expected = hoistway.load_file(model, framework="raw", dtype=None)
    hoistway.release_devices()
    stand_in.set(f"FAULTS={call}:%2=900")
    hoistway.load_file(model, "cuda", framework="raw", dtype="float16")
    tensors = hoistway.load_file(model, "cuda", framework="raw")
    assert all(tensors[name].tobytes() == expected[name].tobytes() for name in expected)


def test_a_device_is_kept_until_it_is_released(model: Path, stand_in: StandIn) -> None:
    hoistway.load_file(model, "cuda", framework="raw")
    before = stand_in.count("calls.cuDevicePrimaryCtxRetain")
    for _ in range(3):
        hoistway.load_file(model, "cuda", framework="raw")
    assert stand_in.count("calls.cuDevicePrimaryCtxRetain") == before
    tensors = hoistway.load_file(model, "cuda", framework="raw")
    hoistway.release_devices()
    released = stand_in.count("calls.cuDevicePrimaryCtxRelease_v2")
    assert tensors["embed"].tobytes(), "what is used stays"
    del tensors
    hoistway.release_devices()
    assert stand_in.count("calls.cuDevicePrimaryCtxRelease_v2") > released


def test_a_child_that_is_forked_while_the_driver_starts_gets_an_error(model: Path) -> None:
    run_beside(
        """
        library.fake_cuda_configure(b"BLOCKS=cuInit")
        loaded = []
        load = lambda: loaded.append(hoistway.load_file(sys.argv[3], "cuda", framework="raw"))
        other = threading.Thread(target=load)
        other.start()
        wait_until(lambda: count("calls.cuInit") > 0)
        child = os.fork()
        if child == 0:
            try:
                hoistway.load_file(sys.argv[3], "cuda", framework="raw")
            except hoistway.errors.DeviceUnavailableError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        codes = []
        def has_ended():
            ended, code = os.waitpid(child, os.WNOHANG)
            codes.extend([code] if ended else [])
            return bool(ended)
        try:
            wait_until(has_ended, 30)
        except AssertionError:
            os.kill(child, 9)
            raise
        finally:
            library.fake_cuda_configure(b"BLOCKS=")
            other.join()
        assert codes == [0], codes
        assert loaded[0]["embed"].tobytes()
        """,
        model,
    )


# A driver that does not tell whether work has ended. The first free is the wait for what is queued on the device.
IN_DOUBT = ",".join(
    [f"cuMemFree_v2:{call}=999" for call in range(2, 400)]
    + [f"{call}:*=999" for call in ("cuEventSynchronize", "cuStreamSynchronize", "cuEventQuery")]
)


def fill_in_vain(model: Path, address: int) -> weakref.ref[TypedArray]:
    """Loads into a target, and returns it weakly."""
    target = TypedArray(address, (1000, 64))
    with contextlib.suppress(errors.DeviceError, errors.DeviceUnavailableError):
        hoistway.open(model).copy_into({"embed": target})
    return weakref.ref(target)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, _: hoistway.release_devices(),
        lambda model, _: hoistway.load_file(model, "cuda", framework="raw"),
        fill_in_vain,
    ],
)
def test_what_owns_a_target_in_doubt_is_kept_until_the_device_tells(
    model: Path, stand_in: StandIn, work: Work, use: Callable[[Path, int], object]
) -> None:
    """Also if no load that was in doubt is waited for again."""
    addresses = [work.memory(1000 * 64 * 4) for _ in range(2)]
    stand_in.set(f"FAULTS={IN_DOUBT}")
    first = fill_in_vain(model, addresses[0])
    gc.collect()
    assert first() is not None, "the device may still write to its memory"
    stand_in.set("FAULTS=")
    use(model, addresses[1])
    gc.collect()
    assert first() is None, "the device has told"
    for address in addresses:
        work.free(address)


def test_what_reads_have_left_in_doubt_is_told_until_the_device_tells(
    model: Path, stand_in: StandIn, work: Work
) -> None:
    from hoistway import _native  # noqa: PLC0415

    address = work.memory(1 << 16)
    reader = _native.ChunkReader(None, 4, 1 << 20, "auto", [])
    stand_in.set(f"FAULTS={IN_DOUBT.replace('cuMemFree_v2:2=', 'cuMemFree_v2:1=999,cuMemFree_v2:2=')}")
    with pytest.raises(errors.DeviceError) as failed:
        reader.read(model, address, 0, 1 << 16, 0)
    cause = failed.value.__cause__
    assert isinstance(cause, errors.DeviceUnavailableError)
    assert hex(address) in str(cause)
    assert "close()" in str(cause)
    with pytest.raises(errors.DeviceUnavailableError):
        reader.close()
    stand_in.set("FAULTS=")
    reader.close()
    assert reader.read(model, address, 0, 1 << 16, 0) == 1 << 16
    reader.close()
    work.free(address)


def test_ctrl_c_leaves_the_interpreter_to_others_while_the_work_ends(model: Path, tmp_path: Path) -> None:
    """The work that the save waits for ends only when another thread of Python runs, after the interrupt."""
    run_beside(
        """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tensors = hoistway.load_file(sys.argv[3], "cuda", framework="raw")
        with Work(library) as work:
            gate = work.gate(work.stream())
            before = count("calls.cuMemFree_v2")
            def interrupt():
                wait_until(lambda: count("calls.cuMemFree_v2") > before)
                os.kill(os.getpid(), signal.SIGINT)
                # By then the other thread waits for its worker.
                time.sleep(0.5)
                gate.open()
            other = threading.Thread(target=interrupt)
            other.start()
            try:
                hoistway.save_file(dict(tensors), sys.argv[4])
            except KeyboardInterrupt:
                pass
            else:
                raise SystemExit("not interrupted")
            other.join()
        """,
        model,
        tmp_path / "saved.safetensors",
    )


def test_ctrl_c_ends_the_wait_for_a_device_that_is_released(model: Path) -> None:
    run_beside(
        """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        hoistway.load_file(sys.argv[3], "cuda", framework="raw")
        library.fake_cuda_configure(b"BLOCKS=cuDevicePrimaryCtxRelease_v2")
        before = count("calls.cuDevicePrimaryCtxRelease_v2")
        ended = threading.Event()
        def interrupt():
            wait_until(lambda: count("calls.cuDevicePrimaryCtxRelease_v2") > before)
            os.kill(os.getpid(), signal.SIGINT)
            # Where it is not interrupted, it ends after this.
            ended.wait(10)
            library.fake_cuda_configure(b"BLOCKS=")
        other = threading.Thread(target=interrupt)
        other.start()
        try:
            hoistway.release_devices()
        except KeyboardInterrupt:
            ended.set()
        other.join()
        assert ended.is_set(), "not interrupted"
        hoistway.release_devices()
        assert hoistway.load_file(sys.argv[3], "cuda", framework="raw")["embed"].tobytes()
        """,
        model,
    )


def test_reads_to_a_device_come_after_what_is_queued_on_it(
    model: Path, stand_in: StandIn, work: Work
) -> None:
    """On the legacy default stream, on streams that are in order with it, and on one that is named."""
    size = 1 << 16
    for stream, named in ((0, None), (0, 0), (work.stream(flags=0), None), (alone := work.stream(), alone)):
        target, earlier = work.memory(size, value=1), work.memory(size)
        gate = work.gate(stream)
        work.copy(earlier, target, size, stream)
        recorded = stand_in.count("calls.cuEventRecord")
        reader = threading.Thread(target=read_chunk, args=(model, target, size, named))
        reader.start()
        wait_until(lambda recorded=recorded: stand_in.count("calls.cuEventRecord") > recorded)
        gate.open()
        reader.join()
        work.synchronize(stream)
        assert work.read(earlier, size) == b"\x01" * size, "what was queued saw the new bytes"
        assert work.read(target, size) == model.read_bytes()[:size]
        work.free(target)
        work.free(earlier)
        if stream:
            work.destroy(stream)


def read_chunk(path: Path, address: int, size: int, stream: int | None = None) -> None:
    """Reads the beginning of a file to a device."""
    from hoistway import _native  # noqa: PLC0415

    reader = _native.ChunkReader(None, 4, 1 << 20, "auto", [])
    assert reader.read(path, address, 0, size, 0, stream) == size
    reader.close()


def test_bytes_of_a_tensor_are_those_that_queued_work_leaves(model: Path, work: Work) -> None:
    tensor = hoistway.load_file(model, "cuda", framework="raw")["embed"]
    gate = work.gate(0)
    work.fill(tensor.data_ptr, tensor.nbytes, 7, 0)
    read = []
    reader = threading.Thread(target=lambda: read.append(tensor.tobytes()))
    reader.start()
    gate.open()
    reader.join()
    assert read == [b"\x07" * tensor.nbytes]


def test_addresses_of_unknown_kind_are_refused(stand_in: StandIn, model: Path, work: Work) -> None:
    """Memory of a device that the driver does not tell is not taken for the host's."""
    address = work.memory(1 << 16)
    stand_in.set("FAULTS=cuPointerGetAttribute:*=999")
    with pytest.raises(errors.HoistwayError):
        read_chunk(model, address, 1 << 16)
    stand_in.library.fake_cuda_reset()
    work.free(address)


EXPERTS = 8
PART = 20_000


@pytest.fixture
def experts_path(tmp_path: Path) -> Path:
    """A layer of experts."""
    parts = {
        f"model.layers.0.mlp.experts.{name}": ("U8", [EXPERTS, PART])
        for name in ("gate_up_proj", "down_proj")
    }
    return write_model(tmp_path / "experts.safetensors", parts)


def test_a_hint_to_a_store_of_experts_does_not_wait_for_the_device(experts_path: Path) -> None:
    run_beside(
        """
        from hoistway import experts
        wanted = {name: tensor.tobytes() for name, tensor in hoistway.load_file(sys.argv[3], framework="raw").items()}
        size = int(sys.argv[4])
        store = experts.ExpertStore.open(
            sys.argv[3], device="cuda", framework="raw", budget=4 * 2 * 20224, batch=0, dense=0
        )
        def check(lease, listed):
            for expert in listed:
                for tensor in lease[expert].values():
                    assert tensor.tobytes() == wanted[tensor.name][expert * size : (expert + 1) * size]
        listed = [0, 1, 2, 3]
        lease = store.ensure(0, listed)
        check(lease, listed)
        lease.release()
        del lease
        with Work(library) as work:
            stream = work.stream()
            gate = work.gate(stream)
            # Evicts, while work that may use what is evicted is queued.
            store.prefetch(0, [4, 5, 6, 7])
            assert not store.is_resident(0, 4)
            ticket = store.ensure_async(0, [4, 5, 6, 7])
            gate.open()
            lease = ticket.wait()
            check(lease, [4, 5, 6, 7])
            lease.release()
            del lease, ticket
            work.destroy(stream)
        store.close()
        """,
        experts_path,
        PART,
    )


def test_a_store_of_experts_loses_no_slot_to_waits_that_fail(experts_path: Path, stand_in: StandIn) -> None:
    wanted = hoistway.load_file(experts_path, framework="raw")
    with experts.ExpertStore.open(
        experts_path, device="cuda", framework="raw", budget=2 * 2 * 20224, batch=0, dense=0, timeout=20
    ) as store:
        for fault in ("cuMemFree_v2:1=999", "cuMemFree_v2:%2=900", "cuMemAlloc_v2:1=999", ""):
            failures = 0
            for expert in range(EXPERTS):
                # Not `set`, which asks for devices to be released.
                assert stand_in.library.fake_cuda_configure(f"FAULTS={fault}".encode()) == 0
                try:
                    lease = store.ensure(0, [expert])
                except errors.HoistwayError:
                    failures += 1
                    stand_in.library.fake_cuda_configure(b"FAULTS=")
                    lease = store.ensure(0, [expert])
                for tensor in lease[expert].values():
                    data = wanted[tensor.name].tobytes()[expert * PART : (expert + 1) * PART]
                    assert tensor.tobytes() == data
                lease.release()
                del lease, tensor
            assert ("999" in fault) == (failures > 0)


def test_memory_of_torchs_is_of_the_stream_where_the_checkpoint_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that read for `hoistway.distributed` have streams of their own."""
    current = threading.local()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _on: getattr(current, "stream", DEFAULT))

    @contextlib.contextmanager
    def use(stream: Any) -> Any:
        before, current.stream = getattr(current, "stream", DEFAULT), stream
        yield
        current.stream = before

    made = []

    def empty(size: int, **_: Any) -> Any:
        made.append(getattr(current, "stream", DEFAULT))
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch, "empty", empty)
    side = types.SimpleNamespace(cuda_stream=77)
    with use(side):
        allocate = torch_allocator("cuda:0")
    lent = []
    reader = threading.Thread(target=lambda: lent.append(allocate(100)))
    reader.start()
    reader.join()
    assert (made, lent[0][1]) == ([side], 77)


def test_captures_loads_blocks_and_experts_go_on_beside_each_other(  # noqa: PLR0915  (four programs at once)
    model: Path, experts_path: Path, stand_in: StandIn, work: Work, tmp_path: Path
) -> None:
    """While the driver refuses calls now and then because of captures, and does not tell the end of some copies.

    What asks again gets the right bytes. ``HOISTWAY_SOAK_SECONDS`` makes it longer: ``just soak-devices``.
    """
    expected = {name: tensor.tobytes() for name, tensor in hoistway.load_file(model, framework="raw").items()}
    wanted = hoistway.load_file(experts_path, framework="raw")
    calls = (
        "cuEventSynchronize",
        "cuEventQuery",
        "cuEventRecord",
        "cuMemHostRegister_v2",
        "cuMemcpyHtoDAsync_v2",
    )
    refused = ",".join(f"{call}:%{7 + number}=900" for number, call in enumerate(calls))
    stand_in.set(f"FAULTS={refused},cuEventSynchronize:%29=999,cuEventSynchronize:%30=999")
    end = time.monotonic() + float(os.environ.get("HOISTWAY_SOAK_SECONDS", "0"))
    failures: list[BaseException] = []

    def succeed(ask: Callable[[], Any]) -> Any:
        """Asks again as long as the device does not tell how something ended."""
        for _ in range(100):
            with contextlib.suppress(errors.HoistwayError):
                answer = ask()
                if getattr(answer, "ok", True):
                    return answer
        raise AssertionError("it does not come to succeed")

    def repeated(action: Callable[[], None]) -> Callable[[], None]:
        def repeat() -> None:
            try:
                work.enter()
                rounds = 0
                while not failures and (rounds < 3 or time.monotonic() < end):
                    action()
                    rounds += 1
                work.leave()
            except BaseException as error:
                failures.append(error)

        return repeat

    def capture() -> None:
        stream, memory = work.stream(), work.memory(4096)
        for value in (1, 2, 3):
            with work.graph(stream, lambda value=value: work.fill(memory, 4096, value, stream)) as launch:
                launch()
                work.synchronize(stream)
                assert work.read(memory, 4096) == bytes([value]) * 4096
        work.destroy(stream)
        work.free(memory)

    def load() -> None:
        tensors = succeed(lambda: hoistway.load_file(model, "cuda", framework="raw"))
        for name, data in expected.items():
            assert succeed(tensors[name].tobytes) == data

    def keep() -> None:
        work.relax()
        address = work.memory(1 << 16)
        array = Array(address, 1 << 16)
        for value in (4, 5):
            work.fill(address, 1 << 16, value, 0)
            work.synchronize(0)
            succeed(lambda value=value: blocks.store([f"{value}"], [array]).wait(60))
            work.fill(address, 1 << 16, 0, 0)
            work.synchronize(0)
            succeed(lambda value=value: blocks.load([f"{value}"], [array]).wait(60))
            assert work.read(address, 1 << 16) == bytes([value]) * (1 << 16)
            blocks.delete([f"{value}"])
        work.free(address)

    def lease() -> None:
        for expert in range(EXPERTS):
            with succeed(lambda expert=expert: leases.ensure(0, [expert])) as lease:
                for tensor in lease[expert].values():
                    data = wanted[tensor.name].tobytes()[expert * PART : (expert + 1) * PART]
                    assert succeed(tensor.tobytes) == data

    store = kv.Store(tmp_path / "store", capacity="256MiB", segment_bytes="16MiB", min_free=0)
    blocks = store.namespace(model="test")
    leases = experts.ExpertStore.open(
        experts_path, device="cuda", framework="raw", budget=2 * 2 * 20224, batch=0, dense=0
    )
    threads = [threading.Thread(target=repeated(action)) for action in (capture, load, keep, lease)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stand_in.library.fake_cuda_reset()
    if not failures:
        # No store is dead, and no slot lost.
        last = work.memory(1 << 16)
        with leases.ensure(0, [0, 1]):
            assert blocks.store(["last"], [Array(last, 1 << 16)]).wait(60).ok
        work.free(last)
    leases.close()
    store.close()
    if failures:
        raise failures[0]
