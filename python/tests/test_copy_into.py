"""`copy_into`: tensors are read into memory of the caller's."""

from __future__ import annotations

import array
import gc
import os
from pathlib import Path
from typing import Any

import hoistway
import numpy as np
import pytest
import torch
from conftest import (
    BITS,
    StandIn,
    assert_threads_end,
    gguf_cases,
    make_cold,
    run,
    same_bytes,
    thread_count,
    write_model,
)
from hoistway.errors import (
    FileChangedError,
    OptionError,
    SliceError,
    TargetError,
    TensorNotFoundError,
    TruncatedError,
    UnsupportedDtypeError,
)
from test_differential import reference_tensors

ROUTES = [
    {},
    {"route": "io_uring"},
    {"route": "threads"},
    {"direct": "never"},
    {"chunk": "4KiB", "threads": 1},
]


@pytest.fixture
def every_type(tmp_path: Path) -> Path:
    """Every type that torch has, in sizes that end nowhere in particular."""
    tensors = {
        f"{dtype}-{'x'.join(map(str, shape))}": (dtype, shape)
        for dtype in BITS
        if not dtype.startswith("F6")
        for shape in ([7, 6], [0, 4], [1023, 514])
    }
    return write_model(tmp_path / "types.safetensors", tensors, padding=5)


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Targets that hold something else."""
    return {
        name: torch.full((*tensor.shape, tensor.element_size()), 0xA5, dtype=torch.uint8)
        .view(tensor.dtype)
        .reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    "options", ROUTES, ids=lambda options: "-".join(map(str, options.values())) or "auto"
)
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "cached"])
def test_targets_of_every_type_hold_what_is_in_the_file(
    every_type: Path, options: dict[str, Any], cold: bool
) -> None:
    expected = reference_tensors(every_type)
    targets = empty_like(expected)
    if cold:
        make_cold(every_type)
    with hoistway.iter_tensors(every_type, copy_into=targets, order="file", **options) as stream:
        for name, tensor in stream:
            assert tensor is targets[name]
            assert same_bytes(tensor, expected.pop(name)), name
    assert not expected
    report = stream.report
    assert report.tensors == len(targets)
    assert report.tensor_bytes == sum(tensor.nbytes for tensor in targets.values())
    assert sum(carrier.tensor_bytes for carrier in report.carriers) == report.tensor_bytes
    assert report.route == options.get("route", "auto")
    if "route" in options:
        assert {carrier.route for carrier in report.carriers} == {options["route"]}


def test_what_has_no_target_is_loaded(model: Path) -> None:
    expected = hoistway.load_file(model)
    wanted = {"embed", "ids", "empty", "scalar"}
    asked = []

    def target(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        asked.append((name, dtype, shape))
        return torch.empty_like(expected[name]) if name in wanted else None

    for order in ("arrival", "file"):
        asked.clear()
        with hoistway.open(model) as checkpoint:
            stream = checkpoint.iter_tensors(copy_into=target, order=order, max_in_flight="1MiB")
            given = list(stream)
            names = [name for name, _ in given]
            keys = checkpoint.keys()
            assert asked == [
                (name, checkpoint.get_dtype(name), tuple(checkpoint.get_shape(name))) for name in keys
            ]
            assert names == keys if order == "file" else sorted(names) == sorted(keys)
            assert checkpoint.report == stream.report
        assert all(same_bytes(tensor, expected[name]) for name, tensor in given)
        assert stream.report.tensors == len(expected)
        assert stream.report.tensor_bytes == expected.report.tensor_bytes


def test_nothing_is_allocated_for_what_has_a_target(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [64 << 20])})
    target = np.empty(64 << 20, np.uint8)
    with hoistway.open(path, framework="numpy") as checkpoint:
        report = checkpoint.copy_into({"a": target}).as_dict()
    assert report["memory"]["arena_bytes"] == 0
    assert report["memory"]["staging_bytes"] <= 128 << 20
    assert target.tobytes() == path.read_bytes()[-target.nbytes :]


def gone_targets() -> dict[str, Any]:
    """Targets for 1000 bytes whose memory has fewer."""
    tensor = torch.zeros(1000, dtype=torch.uint8)
    tensor.untyped_storage().resize_(999)
    array = np.zeros(1010, np.uint8)
    view = array[10:]
    array.resize(20, refcheck=False)
    strided = np.lib.stride_tricks.as_strided(np.zeros(10, np.uint8), (1000,))
    return {"torch": tensor, "numpy": view, "strided": strided, "buffer": memoryview(strided)}


@pytest.mark.parametrize("kind", gone_targets())
def test_nothing_is_read_into_memory_that_is_gone(tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [1000])})
    with hoistway.open(path) as checkpoint:
        with pytest.raises(TargetError, match="has no memory for it") as caught:
            checkpoint.copy_into({"a": gone_targets()[kind]})
        assert caught.value.tensor == "a"
        assert checkpoint.report is None


def test_autograd_sees_what_is_read_into_a_tensor(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("F32", [4]), "b": ("F32", [4])})
    # By every way to name targets, also through a view of the tensor.
    for targets in (lambda a: {"a": a}, lambda a: {"a": a.view(2, 2).view(4)}, lambda a: {"a": a.detach()}):
        weight, factor = torch.ones(4), torch.ones(4, requires_grad=True)
        product = (weight * factor).sum()
        with hoistway.open(path) as checkpoint:
            checkpoint.copy_into(targets(weight))
        assert weight._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    weight = torch.ones(4)
    stream = hoistway.iter_tensors(path, copy_into=lambda name, *_: weight if name == "a" else None)
    assert weight._version == 1
    assert dict(stream)["a"] is weight
    # Nothing is written, so nothing changes.
    with pytest.raises(TargetError):
        hoistway.iter_tensors(path, copy_into={"a": weight.double()})
    assert weight._version == 1
    with torch.inference_mode():
        inferred = torch.ones(4)
    with hoistway.open(path) as checkpoint:
        checkpoint.copy_into({"a": inferred})
        assert same_bytes(inferred, checkpoint.get_tensor("a"))


@pytest.mark.parametrize(
    ("index", "rows_without_gap"),
    [
        (np.s_[3:900], 1000),
        (np.s_[:, 100:300], 1000),
        (np.s_[5:1000, 1:2], 1000),
        (np.s_[17], 1000),
        # Without a gap, each run of these is a read: 307 of each row.
        (np.s_[..., -1], 100),
        (np.s_[4:4], 1000),
        (np.s_[100:900, 2, 3:7], 1000),
        (np.s_[:, :, 1:9], 100),
    ],
    ids=str,
)
@pytest.mark.parametrize("gap", ["64KiB", "0B"])
def test_parts_of_tensors(tmp_path: Path, index: Any, rows_without_gap: int, gap: str) -> None:
    # With a gap, in a file that crosses chunks.
    rows = rows_without_gap if gap == "0B" else 1000
    path = write_model(tmp_path / "m.safetensors", {"a": ("F32", [rows, 307, 11])}, padding=3)
    expected = hoistway.load_file(path)["a"][index].clone()
    target = torch.zeros_like(expected)
    make_cold(path)
    with hoistway.open(path) as checkpoint:
        report = checkpoint.copy_into({"a": target}, slices={"a": index}, coalesce_gap=gap)
    assert torch.equal(target.view(torch.int32), expected.view(torch.int32))
    assert sum(carrier.tensor_bytes for carrier in report.carriers) == report.tensor_bytes == expected.nbytes


def test_columns_of_a_matrix_are_read_as_rows(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [512, 256 << 10])})
    columns = np.s_[:, 64 << 10 : 80 << 10]
    target = np.empty((512, 16 << 10), np.uint8)
    with hoistway.open(path, framework="numpy") as checkpoint:
        report = checkpoint.copy_into({"a": target}, slices={"a": columns})
        assert np.array_equal(target, checkpoint.get_slice("a")[columns])
    assert report.read_bytes <= target.nbytes * 2


def test_whatever_can_be_written_is_a_target(model: Path) -> None:
    expected = hoistway.load_file(model, select=["embed", "ids", "flags"])
    embed = expected["embed"].numpy().tobytes()
    plain = bytearray(len(embed) + 13)
    targets = {
        "memoryview": memoryview(plain)[13:],
        "bytearray": bytearray(len(embed)),
        "numpy": np.empty((1000, 64), np.float32),
        "parameter": torch.nn.Parameter(torch.empty(1000, 64)),
        "row": torch.empty(2, 1000, 64)[1],
    }
    for kind, target in targets.items():
        with hoistway.open(model) as checkpoint:
            checkpoint.copy_into({"embed": target})
        found = target.detach().numpy().tobytes() if isinstance(target, torch.Tensor) else bytes(target)
        assert found == embed, kind
    flags = array.array("B", bytes(17))
    ids = array.array("q", bytes(120))
    with hoistway.open(model) as checkpoint:
        checkpoint.copy_into({"flags": flags, "ids": memoryview(ids).cast("B").cast("q", [3, 5])})
    assert flags.tobytes() == expected["flags"].numpy().tobytes()
    assert ids.tobytes() == expected["ids"].numpy().tobytes()
    # Who holds a target while it is filled lets it go.
    targets["bytearray"].append(1)


def bad_targets() -> dict[str, Any]:
    read_only = np.empty((1000, 64), np.float32)
    read_only.flags.writeable = False
    return {
        "another type": torch.empty(1000, 64, dtype=torch.float16),
        "another type of the same size": torch.empty(1000, 64, dtype=torch.int32),
        "another shape": torch.empty(64, 1000),
        "too large": torch.empty(1001, 64),
        "transposed": torch.empty(64, 1000).T,
        "strided": torch.empty(1000, 128)[:, ::2],
        "meta": torch.empty(1000, 64, device="meta"),
        "sparse": torch.empty(1000, 64).to_sparse(),
        "numpy of another type": np.empty((1000, 64), np.float64),
        "numpy of the other byte order": np.empty((1000, 64), ">f4"),
        "numpy transposed": np.empty((64, 1000), np.float32).T,
        "numpy read-only": read_only,
        "bytes": bytes(256_000),
        "short": bytearray(255_999),
        "floats of another size": array.array("d", bytes(256_000)),
        "strided view": memoryview(bytearray(512_000))[::2],
        "a list": [0.0] * 64_000,
        "a number": 7,
    }


@pytest.mark.parametrize("kind", bad_targets())
def test_a_target_that_does_not_fit_is_an_error_before_anything_is_read(model: Path, kind: str) -> None:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    with hoistway.open(model) as checkpoint:
        with pytest.raises(TargetError, match="embed") as caught:
            checkpoint.iter_tensors(copy_into={"ids": ids, "embed": bad_targets()[kind]})
        assert checkpoint.report is None
    assert caught.value.tensor == "embed"
    assert isinstance(caught.value, ValueError)
    assert not ids.any()


def test_requests_that_cannot_be(model: Path, tmp_path: Path) -> None:
    embed = torch.empty(1000, 64)
    with hoistway.open(model) as checkpoint:
        with pytest.raises(TensorNotFoundError, match="embedding"):
            checkpoint.copy_into({"embedding": embed})
        with pytest.raises(SliceError, match="step"):
            checkpoint.copy_into({"embed": embed[:500]}, slices={"embed": np.s_[::2]})
        with pytest.raises(OptionError, match="overlap"):
            checkpoint.copy_into(
                {"layers.0.weight": bytearray(0) or (shared := bytearray(1 << 20)), "layers.1.weight": shared}
            )
        with pytest.raises(OptionError, match="mapped"):
            checkpoint.copy_into({"embed": embed}, route="mapped")
        assert checkpoint.copy_into({}).tensors == 0
        # What is not selected needs no target.
        given = dict(checkpoint.iter_tensors(copy_into={"ids": bytearray(1)}, select="embed"))
        assert list(given) == ["embed"]
    odd = write_model(tmp_path / "odd.safetensors", {"six": ("F6_E2M3", [4, 4]), "four": ("F4", [2, 3, 2])})
    with hoistway.open(odd) as checkpoint:
        for name in ("six", "four"):
            with pytest.raises(UnsupportedDtypeError, match=name):
                checkpoint.copy_into({name: np.empty(12, np.uint8)})
        raw = {"six": bytearray(12), "four": bytearray(6)}
        checkpoint.copy_into(raw)
        assert b"".join(raw.values()) == odd.read_bytes()[-18:]


@pytest.mark.parametrize("name", ["layers.*", "*", "embe?", "lm_head.weight"])
def test_what_is_not_the_very_name_of_a_tensor_is_an_error(model: Path, name: str) -> None:
    target = torch.zeros(1000, 64)
    with hoistway.open(model) as checkpoint:
        with pytest.raises(TensorNotFoundError):
            checkpoint.copy_into({"embed": target, name: target.clone()})
        with pytest.raises(TensorNotFoundError):
            checkpoint.iter_tensors(copy_into={"embed": target, name: target.clone()})
        assert checkpoint.report is None
    assert not target.any()


def test_a_target_that_is_none_is_an_error_where_all_must_be_filled(model: Path) -> None:
    target = torch.zeros(1000, 64)
    with hoistway.open(model) as checkpoint:
        with pytest.raises(TargetError, match=r"layers\.0\.weight") as caught:
            checkpoint.copy_into({"embed": target, "layers.0.weight": None})
        given = dict(checkpoint.iter_tensors(copy_into={"embed": target, "ids": None}))
        assert given["embed"] is target
        assert given.keys() == set(checkpoint.keys())
    assert caught.value.tensor == "layers.0.weight"


def test_names_that_look_like_patterns_are_names(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a*": ("U8", [9]), "ab": ("U8", [9]), "[x]": ("U8", [5])})
    targets = {"a*": bytearray(9), "[x]": bytearray(5)}
    with hoistway.open(path, framework="numpy") as checkpoint:
        assert checkpoint.copy_into(targets).tensors == 2
        expected = checkpoint.load()
    assert all(bytes(target) == expected[name].tobytes() for name, target in targets.items())


def test_a_fill_that_cannot_begin_leaves_no_load_behind(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [4 << 20]) for i in range(16)})
    make_cold(path)
    before = thread_count()
    shared = np.zeros(4 << 20, np.uint8)
    slow = {"route": "threads", "direct": "always", "chunk": "4KiB", "threads": 1}
    with hoistway.open(path, framework="numpy") as checkpoint:
        with pytest.raises(OptionError, match="overlap") as caught:
            checkpoint.iter_tensors(copy_into={"t0": shared, "t1": shared}, **slow)
        # The traceback is held here.
        assert caught.tb is not None
        assert_threads_end(before)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pool", hoistway.MemoryPool("4KiB")),
        ("numa", "99"),
        ("numa", "near_storage"),
        ("layout", "packed"),
        ("rings", 2),
        ("huge_pages", "reserved"),
        ("populate", True),
        ("dtype", "bfloat16"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_for_targets_are_refused(model: Path, option: str, value: Any) -> None:
    target = torch.zeros(1000, 64)
    with hoistway.open(model) as checkpoint:
        with pytest.raises(OptionError, match=f"^{option} cannot be"):
            checkpoint.copy_into({"embed": target}, **{option: value})
        assert checkpoint.report is None
    assert not target.any()


def test_options_of_memory_are_about_tensors_without_targets(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hoistway.load_file(model)
    target = torch.zeros(1000, 64)
    pool = hoistway.MemoryPool("64MiB")
    with hoistway.open(model) as checkpoint:
        stream = checkpoint.iter_tensors(copy_into={"embed": target}, pool=pool, layout="packed")
        assert all(same_bytes(tensor, expected[name]) for name, tensor in stream)
        assert stream.report.as_dict()["memory"]["pooled"]
    assert same_bytes(target, expected["embed"])
    monkeypatch.setenv("HOISTWAY_LAYOUT", "packed")
    monkeypatch.setenv("HOISTWAY_RINGS", "2")
    with hoistway.open(model, pool=pool, numa="near_storage") as checkpoint:
        report = checkpoint.copy_into({"embed": target.zero_()}).as_dict()
        assert not report["memory"]["pooled"]
        assert report["memory"]["layout"] == "file"
    assert same_bytes(target, expected["embed"])


def test_targets_and_others_come_in_the_order_of_arrival(tmp_path: Path) -> None:
    targets = {f"t{i}": bytearray(4 << 20) for i in range(8)}
    tensors = {name: ("U8", [len(target)]) for name, target in targets.items()}
    path = write_model(tmp_path / "m.safetensors", {**tensors, "small": ("U8", [100])})
    make_cold(path)
    slow = {"route": "threads", "direct": "always", "chunk": "4KiB", "threads": 1}
    with hoistway.iter_tensors(path, framework="numpy", copy_into=targets, **slow) as stream:
        names = [name for name, _ in stream]
    assert sorted(names) == sorted([*tensors, "small"])
    assert names.index("small") < names.index("t7")


def test_parts_of_very_many_runs_take_little_memory(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [300_000, 8])}, padding=3)
    done = run(
        """
        import resource, sys
        import numpy as np
        import hoistway

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

        target, checkpoint = np.zeros((300_000, 4), np.uint8), hoistway.open(sys.argv[1], framework="numpy")
        expected = checkpoint.get_tensor("a")[:, :4]
        checkpoint.copy_into({"a": target[:9]}, slices={"a": np.s_[:9, :4]}, coalesce_gap=0)
        before = peak()
        report = checkpoint.copy_into({"a": target}, slices={"a": np.s_[:, :4]}, coalesce_gap=0)
        print(peak() - before)
        assert np.array_equal(target, expected)
        assert sum(carrier.tensor_bytes for carrier in report.carriers) == 1_200_000
        assert sum(carrier.reads for carrier in report.carriers) >= 300_000
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 32 << 20


def test_quantised_tensors_are_read_as_bytes_of_blocks(tmp_path: Path) -> None:
    compared = 0
    for case in gguf_cases():
        if case.errors[False] is not None or not case.tensors:
            continue
        path = case.write(tmp_path / case.name.replace("/", "-"))
        with hoistway.open(path, offset=case.offset) as checkpoint:
            try:
                expected = checkpoint.load()
            except hoistway.HoistwayError:
                continue
            targets = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
            checkpoint.copy_into(targets)
        assert all(same_bytes(targets[name], tensor) for name, tensor in expected.items()), case.name
        compared += len(targets)
    assert compared > 20


@pytest.mark.parametrize("order", ["arrival", "file"])
def test_a_file_that_is_cut_is_an_error_that_warns_of_the_targets(tmp_path: Path, order: str) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [1 << 20]) for i in range(8)})
    targets = {f"t{i}": bytearray(1 << 20) for i in range(8)}
    threads = thread_count()
    with hoistway.open(path) as checkpoint:
        os.truncate(path, 5 << 20)
        with pytest.raises((TruncatedError, FileChangedError), match="undefined") as caught:
            list(checkpoint.iter_tensors(copy_into=targets, order=order))
    assert Path(caught.value.path) == path
    assert caught.value.tensor in targets
    assert_threads_end(threads)


def test_a_stream_that_is_left_lets_its_targets_go(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {f"t{i}": ("U8", [8 << 20]) for i in range(8)})
    make_cold(path)
    before = thread_count()
    targets = {f"t{i}": bytearray(8 << 20) for i in range(8)}
    with hoistway.iter_tensors(path, copy_into=targets) as stream:
        next(stream)
        with pytest.raises(BufferError):
            targets["t0"].clear()
    for target in targets.values():
        target.clear()
    assert_threads_end(before)
    targets = {f"t{i}": bytearray(8 << 20) for i in range(8)}
    for _ in hoistway.iter_tensors(path, copy_into=targets):
        break
    del _
    gc.collect()
    # No read into the memory that is freed here is in flight.
    for target in targets.values():
        target.clear()
    assert_threads_end(before)


class DeviceMemory:
    """Bytes of a device as other libraries show them."""

    def __init__(self, tensor: hoistway.Tensor, start: int, size: int) -> None:
        self.tensor, self.start, self.size = tensor, start, size
        self.read_only = False
        self.strides: tuple[int, ...] | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self.tensor.data_ptr + self.start
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (address, self.read_only),
            "version": 3,
            "strides": self.strides,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def tobytes(self) -> bytes:
        return self.tensor.tobytes()[self.start : self.start + self.size]


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("route", ["auto", "staged", "threads", "io_uring"])
def test_memory_of_a_device_is_a_target(stand_in: StandIn, tmp_path: Path, device: str, route: str) -> None:
    sizes = {"a": 5 << 20, "b": 4097, "c": 0, "d": 1}
    path = write_model(tmp_path / "m.safetensors", {name: ("U8", [size]) for name, size in sizes.items()})
    space = write_model(tmp_path / "space.safetensors", {"space": ("U8", [16 << 20])})
    memory = hoistway.load_file(space, device, framework="raw")["space"]
    before = stand_in.count("device_bytes")
    starts = {"a": 3, "b": 6 << 20, "c": 0, "d": (6 << 20) + 4097}
    targets = {name: DeviceMemory(memory, starts[name], size) for name, size in sizes.items()}
    expected = hoistway.load_file(path, framework="raw")
    make_cold(path)
    with hoistway.open(path, framework="raw") as checkpoint:
        report = checkpoint.copy_into(targets, route=route)
        assert all(target.tobytes() == expected[name].tobytes() for name, target in targets.items())
        past_host = [carrier for carrier in report.carriers if carrier.via is None]
        assert all(carrier.route == "gds" and route == "auto" for carrier in past_host)
        assert {carrier.via for carrier in report.carriers} - {None} == {"staged"}
        assert report.as_dict()["device"]["device"] == device
        columns = DeviceMemory(memory, 1, 100)
        checkpoint.copy_into({"a": columns}, slices={"a": slice(1000, 1100)})
        assert columns.tobytes() == expected["a"].tobytes()[1000:1100]
        columns.read_only = True
        with pytest.raises(TargetError, match="read-only"):
            checkpoint.copy_into({"a": columns}, slices={"a": slice(1000, 1100)})
    assert stand_in.count("device_bytes") == before
    del memory, targets, columns


@pytest.mark.parametrize("gap", ["64KiB", "0B"])
@pytest.mark.parametrize("index", [np.s_[:, 3:9], np.s_[100:9000, 1:2], np.s_[5:7000:1, 0:15]], ids=str)
def test_columns_reach_a_device_in_few_copies(
    stand_in: StandIn, tmp_path: Path, index: Any, gap: str
) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [9001, 16])}, padding=7)
    space = write_model(tmp_path / "space.safetensors", {"space": ("U8", [1 << 20])})
    memory = hoistway.load_file(space, "cuda:0", framework="raw")["space"]
    before = memory.tobytes()
    expected = hoistway.load_file(path, framework="numpy")["a"][index].tobytes()
    columns = DeviceMemory(memory, 5, len(expected))
    make_cold(path)
    with hoistway.open(path, framework="raw") as checkpoint:
        report = checkpoint.copy_into({"a": columns}, slices={"a": index}, coalesce_gap=gap, chunk="4KiB")
    assert columns.tobytes() == expected
    # And nothing else was written.
    assert memory.tobytes() == before[:5] + expected + before[5 + len(expected) :]
    assert sum(carrier.tensor_bytes for carrier in report.carriers) == len(expected)
    reads = sum(carrier.reads for carrier in report.carriers)
    assert reads <= 36 if gap != "0B" else reads > 6000
