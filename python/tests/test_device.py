"""Loading to devices: those of the stand-in driver, whose memory no framework can look at."""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import hoistway
import numpy as np
import pytest
import torch
from conftest import STAND_IN, Lent, StandIn, make_cold, run, write_model
from hoistway import _devices, errors
from hoistway.compat.safetensors._target import check_device

pytestmark = pytest.mark.usefixtures("stand_in")

# Each wait for all work of a device makes one such call.
SETTLES = "calls.cuMemFree_v2"


def test_devices_are_named_as_everywhere(model: Path) -> None:
    expected = hoistway.load_file(model, framework="raw")
    for device, name in [
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        (1, "cuda:1"),
        (np.int64(1), "cuda:1"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cpu"), "cpu"),
        ("rocm", "rocm:0"),
        ("rocm:1", "rocm:1"),
        ("hip:1", "rocm:1"),
    ]:
        tensors = hoistway.load_file(model, device, framework="raw")
        assert {tensor.device for tensor in tensors.values()} == {name}
        assert all(tensors[key].tobytes() == expected[key].tobytes() for key in expected)
    for wrong in ["gpu", "cuda:x", "mps"]:
        with pytest.raises(errors.OptionError, match="cuda:N"):
            hoistway.load_file(model, wrong)


def test_the_report_names_the_way_of_every_byte(model: Path) -> None:
    make_cold(model)
    tensors = hoistway.load_file(model, "cuda:1", framework="raw")
    report = tensors.report
    assert sum(carrier.tensor_bytes for carrier in report.carriers) == report.tensor_bytes
    by_device = ("gds", "gds-compat", "pinned-cache")
    assert {(carrier.route in by_device, carrier.via) for carrier in report.carriers} <= {
        (True, None),
        (False, "staged"),
    }
    device = report.as_dict()["device"]
    assert device["device"] == "cuda:1"
    assert device["memory_bytes"] > 0
    assert "on cuda:1" in str(report)


def test_slices_arrivals_and_single_tensors(model: Path) -> None:
    with hoistway.open(model, framework="numpy") as host:
        embed = host["embed"]
    with hoistway.open(model, device="cuda", framework="raw") as checkpoint:
        part = checkpoint.load(select="embed", slices={"embed": (slice(10, 20), slice(3, 8))})["embed"]
        assert part.shape == (10, 5)
        assert part.tobytes() == embed[10:20, 3:8].tobytes()
        assert checkpoint["embed"].tobytes() == embed.tobytes()
        arrived = dict(checkpoint)
    assert arrived["embed"].tobytes() == embed.tobytes()
    assert arrived["empty"].nbytes == 0


class DlTensor(ctypes.Structure):
    """The beginning of DLPack's older structure."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
    )


def dl_tensor(capsule: Any) -> DlTensor:
    """What a capsule says."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return DlTensor.from_address(get(capsule, b"dltensor"))


def test_dlpack_says_where_the_tensor_is_and_keeps_its_memory(model: Path, stand_in: StandIn) -> None:
    tensor = hoistway.load_file(model, "cuda:1", framework="raw")["embed"]
    assert tensor.__dlpack_device__() == (2, 1)
    for stream in (None, -1, 1, 2, 12345):
        capsule = tensor.__dlpack__(stream=stream)
        told = dl_tensor(capsule)
        assert (told.device_type, told.device_id, told.data) == (2, 1, tensor.data_ptr)
    with pytest.raises(ValueError, match="ambiguous"):
        tensor.__dlpack__(stream=0)
    with pytest.raises(BufferError, match="cuda:1"):
        tensor.__dlpack__(dl_device=(1, 0))
    del tensor
    assert stand_in.count("device_bytes") > 0, "the capsule owns the memory"
    del capsule
    assert stand_in.left("device_bytes") == 0


def test_numpy_has_no_device_memory(model: Path) -> None:
    with pytest.raises(errors.OptionError, match="host memory"):
        hoistway.load_file(model, "cuda", framework="numpy")
    tensor = hoistway.load_file(model, "cuda", framework="raw")["embed"]
    with pytest.raises(AttributeError, match="memory of a device"):
        _ = tensor.__array_interface__
    assert "cuda:0" in repr(tensor)


def test_errors_are_typed_and_say_what_to_do(model: Path, stand_in: StandIn) -> None:
    with pytest.raises(errors.DeviceUnavailableError, match="2 devices") as absent:
        hoistway.load_file(model, "cuda:5", framework="raw")
    assert isinstance(absent.value, RuntimeError)
    assert absent.value.device == "cuda:5"
    stand_in.set("FAULTS=copy:1=719")
    with pytest.raises(errors.DeviceError, match="cuda:0") as lost:
        hoistway.load_file(model, "cuda", framework="raw")
    assert isinstance(lost.value, RuntimeError)
    stand_in.library.fake_cuda_reset()
    stand_in.set("MEMORY_MIB=1")
    with pytest.raises(MemoryError, match="the memory of cuda:0"):
        hoistway.load_file(model, "cuda", framework="raw")
    for options in ({"route": "mapped"}, {"pool": hoistway.MemoryPool("1MiB")}, {"dtype": "int8"}):
        with pytest.raises(errors.OptionError):
            hoistway.load_file(model, "cuda", framework="raw", **options)
    for options in ({"route": "gds"}, {"route": "staged"}, {"dtype": torch.float16}):
        with pytest.raises(errors.OptionError, match="cpu"):
            hoistway.load_file(model, **options)
    with hoistway.open(model, framework="raw") as checkpoint:
        for options in (
            {"device": "cuda"},
            {"allocator": "torch"},
            {"allocator": lambda _size: (1, 0, None)},
        ):
            with pytest.raises(errors.OptionError, match="the options are"):
                checkpoint.load(**options)
            with pytest.raises(errors.OptionError, match="the options are"):
                next(checkpoint.iter_tensors(**options))
    with pytest.raises(errors.OptionError, match="one of driver, torch"):
        hoistway.load_file(model, "cuda", allocator="numpy")


def test_devices_of_torchs_build_for_rocm_are_those_of_rocm(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3.42134")
    for device, name in [
        (torch.device("cuda", 1), "rocm:1"),
        (torch.device("cuda"), "rocm:0"),
        (1, "rocm:1"),
        # Text names a kind: that of its name.
        ("cuda:1", "cuda:1"),
        ("rocm:1", "rocm:1"),
    ]:
        tensors = hoistway.load_file(model, device, framework="raw")
        assert {tensor.device for tensor in tensors.values()} == {name}
    assert _devices.to_torch(torch, "rocm:1") == "cuda:1"
    assert _devices.to_torch(torch, "cpu") == "cpu"
    with pytest.raises(errors.OptionError, match="built for rocm"):
        _devices.to_torch(torch, "cuda:1")
    # Where torch's names are meant, text is one of them.
    assert check_device("cuda:1") == check_device(1) == "rocm:1"


def test_torchs_memory_is_refused_for_devices_that_it_is_not_built_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(errors.OptionError, match="built for cuda"):
        hoistway.load_file(model, "rocm:0", allocator="torch")
    monkeypatch.setattr(torch.version, "hip", "6.3.42134")
    with pytest.raises(errors.OptionError, match="built for rocm"):
        hoistway.load_file(model, "cuda:0", allocator="torch")


@pytest.mark.parametrize(("hip", "kind"), [("'6.3.42134'", "rocm"), ("None", "cuda")])
def test_numbers_mean_the_devices_of_the_torch_that_is_installed(
    model: Path, tmp_path: Path, hip: str, kind: str
) -> None:
    """Before it is imported, too: here it never is."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not here')")
    (package / "version.py").write_text(f"cuda: Optional[str] = None\nhip: Optional[str] = {hip}\n")
    done = run(
        """
        import sys
        sys.path.insert(0, sys.argv[3])
        import hoistway
        from hoistway.compat.fastsafetensors._devices import Device
        from hoistway.compat.safetensors._target import check_device
        kind = sys.argv[2]
        tensors = hoistway.load_file(sys.argv[1], 1, framework="raw")
        assert {tensor.device for tensor in tensors.values()} == {f"{kind}:1"}
        assert check_device("cuda:1") == check_device(1) == Device.of("cuda:1").as_own() == f"{kind}:1"
        assert "torch" not in sys.modules
        """,
        model,
        kind,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_stub_of_torch_is_no_torch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half imported, it has no devices yet; and a module that a program made has no ``__spec__``."""
    expected = hoistway.load_file(model, framework="raw")["embed"].tobytes()
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setattr(_devices, "_has_told", False)
    for device in ("cpu", "cuda:1", 1):
        assert hoistway.load_file(model, device, framework="raw")["embed"].tobytes() == expected


def test_managed_memory_of_cuda_is_a_target(model: Path) -> None:
    """DLPack has a type of its own for it."""
    tensor = hoistway.load_file(model, "cuda:1", framework="raw")["embed"]

    class Managed:
        """Memory of such a type."""

        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "version": 3,
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr, False),
        }

        def __dlpack_device__(self) -> tuple[int, int]:
            return (13, 1)

    path = write_model(model.parent / "bytes.safetensors", {"bytes": ("U8", [tensor.nbytes])})
    expected = hoistway.load_file(path, framework="raw")["bytes"].tobytes()
    with hoistway.open(path, framework="raw") as checkpoint:
        checkpoint.copy_into({"bytes": Managed()})
    assert tensor.tobytes() == expected


def test_tensors_on_rocm_are_shared_as_such(model: Path, stand_in: StandIn) -> None:
    expected = hoistway.load_file(model, framework="raw")["embed"].tobytes()
    tensor = hoistway.load_file(model, "rocm:1", framework="raw")["embed"]
    assert tensor.tobytes() == expected
    assert tensor.__dlpack_device__() == (10, 1)
    for stream in (None, -1, 0, 12345):
        capsule = tensor.__dlpack__(stream=stream)
        told = dl_tensor(capsule)
        assert (told.device_type, told.device_id, told.data) == (10, 1, tensor.data_ptr)
        del capsule
    for stream in (1, 2):
        with pytest.raises(ValueError, match="CUDA's alone"):
            tensor.__dlpack__(stream=stream)
    del tensor
    assert stand_in.left("device_bytes") == 0


def test_a_rocm_device_refuses_what_it_lacks(model: Path, stand_in: StandIn) -> None:
    with pytest.raises(errors.DeviceUnavailableError, match="rocm:0 to rocm:1"):
        hoistway.load_file(model, "rocm:5", framework="raw")
    with pytest.raises(errors.RouteUnavailableError, match="hipFile"):
        hoistway.load_file(model, "rocm", framework="raw", route="gds")
    stand_in.set("HIP_ARCHITECTURE=gfx803")
    with pytest.raises(errors.DeviceUnavailableError, match="converts no elements"):
        hoistway.load_file(model, "rocm", framework="raw", dtype="float32")


def test_memory_of_torch_is_used_and_given_back(
    model: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def allocate(size: int) -> tuple[int, int, Any]:
        sizes.append(size)
        return stand_in.lend(size)

    monkeypatch.setattr("hoistway._checkpoint.torch_allocator", lambda _device: allocate)
    expected = hoistway.load_file(model, framework="raw")
    tensors = hoistway.load_file(model, "cuda", framework="raw", allocator="torch", layout="tensor")
    assert all(tensors[name].tobytes() == expected[name].tobytes() for name in expected)
    assert Lent.alive == len(sizes) > 1
    del tensors
    assert Lent.alive == 0

    def refuse(size: int) -> tuple[int, int, Any]:
        raise RuntimeError(f"no {size} bytes are left")

    monkeypatch.setattr("hoistway._checkpoint.torch_allocator", lambda _device: refuse)
    with pytest.raises(MemoryError, match="bytes are left"):
        hoistway.load_file(model, "cuda", framework="raw", allocator="torch")


def test_a_child_of_fork_gets_an_error_and_the_parent_goes_on(model: Path) -> None:
    done = run(
        """
        import os, sys, hoistway
        tensors = hoistway.load_file(sys.argv[1], "cuda", framework="raw")
        expected = tensors["embed"].tobytes()
        child = os.fork()
        if child == 0:
            try:
                hoistway.load_file(sys.argv[1], "cuda", framework="raw")
            except hoistway.errors.DeviceUnavailableError as error:
                assert "fork" in str(error) and "spawn" in str(error), error
            else:
                os._exit(1)
            try:
                tensors["embed"].tobytes()
            except hoistway.errors.ForkedError:
                pass
            else:
                os._exit(2)
            del tensors
            assert hoistway.load_file(sys.argv[1], framework="raw")["embed"].tobytes() == expected
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert tensors["embed"].tobytes() == expected
        hoistway.load_file(sys.argv[1], "cuda", framework="raw")
        """,
        model,
    )
    assert done.returncode == 0, done.stderr


def test_without_a_driver_importing_and_loading_to_the_host_work(model: Path) -> None:
    done = run(
        """
        import sys, hoistway
        hoistway.load_file(sys.argv[1], framework="raw")
        try:
            hoistway.load_file(sys.argv[1], "cuda", framework="raw")
        except hoistway.errors.DeviceUnavailableError as error:
            assert "install NVIDIA's driver" in str(error), error
        else:
            raise SystemExit("no error")
        """,
        model,
        HOISTWAY_CUDA_DRIVER="/nonexistent/libcuda.so.1",
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_load_that_waits_for_copies(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [8 << 20]) for i in range(16)})
    script = """
        import ctypes, os, signal, sys, threading, hoistway
        sys.path.insert(0, sys.argv[2])
        from interrupting import wait_until
        signal.signal(signal.SIGINT, signal.default_int_handler)
        library = ctypes.CDLL(sys.argv[3])
        library.fake_cuda_count.restype = ctypes.c_uint64
        calls = [b"calls.cuMemcpyHtoDAsync_v2", b"calls.cuMemcpyBatchAsync"]
        def interrupt():
            wait_until(lambda: any(map(library.fake_cuda_count, calls)))
            os.kill(os.getpid(), signal.SIGINT)
        other = threading.Thread(target=interrupt)
        other.start()
        try:
            hoistway.load_file(sys.argv[1], "cuda", framework="raw")
        except KeyboardInterrupt:
            print("interrupted")
        other.join()
    """
    done = run(script, path, Path(__file__).parent, STAND_IN, timeout=60, FAKE_CUDA_COPY_LATENCY_US="500000")
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_many_loads_in_a_row_leave_nothing(model: Path, stand_in: StandIn) -> None:
    for _ in range(20):
        hoistway.load_file(model, "cuda", framework="raw")
    assert stand_in.count("leaked") == 0
    assert stand_in.count("cufile_buffers") == 0
    # A device keeps streams and events for later loads.
    hoistway.release_devices()
    assert np.all([stand_in.count(what) == 0 for what in ("streams", "events")])


def test_a_child_of_fork_keeps_its_own_memory_when_it_drops_a_load(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [4 << 20]) for i in range(24)})
    done = run(
        """
        import gc, mmap, os, sys, time, hoistway
        checkpoint = hoistway.open(sys.argv[1], device="cuda", framework="raw")
        arriving = checkpoint.iter_tensors(route="staged", layout="packed")
        next(arriving)
        time.sleep(1)
        child = os.fork()
        if child == 0:
            # What lies where the parent has its slots, which children do not get.
            blocks = [mmap.mmap(-1, 8 << 20) for _ in range(40)]
            for block in blocks:
                block[0] = 1
            del arriving
            gc.collect()
            for block in blocks:
                block[0] = block[0] + 1
            os._exit(0 if all(block[0] == 2 for block in blocks) else 1)
        assert os.waitpid(child, 0)[1] == 0
        """,
        path,
    )
    assert done.returncode == 0, done.stderr


def test_layers_stream_to_a_device_within_the_budget(tmp_path: Path) -> None:
    size = 64 << 10
    tensors = {f"layers.{layer}.{part}": ("U8", [size]) for layer in range(4) for part in ("up", "down")}
    path = write_model(tmp_path / "layers.safetensors", tensors)
    expected = hoistway.load_file(path, framework="raw")
    for stream in (None, 0):
        options = {"device": "cuda:1", "stream": stream, "framework": "raw"}
        with hoistway.stream_layers(path, budget=4 * size, **options) as layers:
            for _ in range(2):
                for layer in layers:
                    for name, tensor in layer.items():
                        assert tensor.device == "cuda:1"
                        assert tensor.tobytes() == expected[name].tobytes()
                    del tensor
            stats = layers.stats()
        assert stats["served"] == 8
        assert stats["peak_device_bytes"] == stats["peak_bytes"] == 4 * size


def test_layers_wait_for_the_stream_that_used_their_memory_and_for_no_other(
    tmp_path: Path, stand_in: StandIn
) -> None:
    size = 64 << 10
    path = write_model(tmp_path / "layers.safetensors", {f"layers.{n}.up": ("U8", [size]) for n in range(4)})
    waits: dict[int | None, list[int]] = {}
    for stream in (None, 0):
        with hoistway.stream_layers(
            path, budget=2 * size, device="cuda:0", stream=stream, framework="raw"
        ) as layers:
            counts = []
            for _ in range(3):
                counts.append(stand_in.count(SETTLES))
                for layer in layers:
                    assert len(layer[f"{layer.name}.up"].tobytes()) == size
            waits[stream] = [after - before for before, after in itertools.pairwise(counts)]
    # The first pass opens the device and its reader.
    assert waits[0][1] == 0 < waits[None][1], waits


def test_a_stream_of_layers_that_is_closed_frees_all_but_what_is_held(tmp_path: Path) -> None:
    size = 64 << 10
    path = write_model(tmp_path / "layers.safetensors", {f"layers.{n}.up": ("U8", [size]) for n in range(4)})
    taken = []

    def leave() -> None:
        options = {"device": "cuda:0", "stream": 0, "framework": "raw"}
        with hoistway.stream_layers(path, budget=4 * size, **options) as layers:
            taken.append(layers.next_layer()["layers.0.up"])
            raise KeyError("of the block")

    # The end of the block hides no error.
    with pytest.raises(KeyError, match="of the block"):
        leave()
    (held,) = taken
    assert held.tobytes() == hoistway.load_file(path, framework="raw")["layers.0.up"].tobytes()


def test_streams_of_layers_refuse_what_is_no_device_or_stream(model: Path) -> None:
    with pytest.raises(errors.OptionError, match="numpy"):
        hoistway.stream_layers(model, {"all": ["a"]}, device="cuda:0", framework="numpy")
    with pytest.raises(errors.ArgumentError, match="stream cannot be"):
        hoistway.stream_layers(model, device="cuda:0", stream="default", framework="raw")
    with pytest.raises(errors.ArgumentError, match="stream cannot be -1"):
        hoistway.stream_layers(model, device="cuda:0", stream=-1, framework="raw")
    with pytest.raises(errors.OptionError, match="host memory"):
        hoistway.stream_layers(model, stream=0, framework="raw")
    elsewhere = SimpleNamespace(cuda_stream=0, device_index=1)
    with pytest.raises(errors.OptionError, match="one of device 1"):
        hoistway.stream_layers(model, device="cuda:0", stream=elsewhere, framework="raw")
