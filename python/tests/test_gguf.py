"""GGUF files from Python: what they hold, what they say about themselves, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import corpus
import hoistway
import numpy as np
import pytest
import torch
from conftest import GgufCase, gguf_cases, make_cold, run
from hoistway.errors import (
    CheckpointNotFoundError,
    FileChangedError,
    FormatError,
    OptionError,
    SliceError,
    TruncatedError,
    UnsupportedDtypeError,
)
from hoistway.experts import ExpertStore, Rows
from python_server import Server
from write import KINDS, TYPES, Array, File, Tensor

CASES = list(gguf_cases())
PLAIN = {name: kind for name, kind in TYPES.items() if kind.elements == 1}
SCALARS = {
    "u8": 255,
    "i8": -128,
    "u16": 65535,
    "i16": -32768,
    "u32": 2**32 - 1,
    "i32": -(2**31),
    "f32": 0.5,
    "bool": True,
    "string": "ü",
    "u64": 2**64 - 1,
    "i64": -(2**63),
    "f64": 1e300,
}


def write(path: Path, *tensors: Tensor, metadata=(), **options) -> Path:
    """Writes a file of tensors."""
    path.write_bytes(File(metadata, tensors, **options).to_bytes())
    return path


def filled(name: str, shape: list[int], kind: str = "F32", seed: int = 0) -> Tensor:
    """A tensor of random bytes."""
    size = Tensor(name, shape, kind).size
    return Tensor(name, shape, kind, data=np.random.default_rng(seed).bytes(size))


def expected_array(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor: rows of blocks."""
    kind = TYPES[tensor.type]
    rows = (
        [*tensor.shape[:-1], tensor.shape[-1] // kind.elements * kind.bytes] if tensor.shape else [kind.bytes]
    )
    return np.frombuffer(tensor.data, np.uint8).reshape(rows)


@pytest.fixture
def every_type(tmp_path: Path) -> tuple[Path, list[Tensor]]:
    """A file with a tensor of every type."""
    tensors = [
        filled(name, [3, 2, 4 * kind.elements], name, seed) for seed, (name, kind) in enumerate(TYPES.items())
    ]
    return write(tmp_path / "types.gguf", *tensors), tensors


def test_the_corpus_is_what_its_sources_make() -> None:
    assert corpus.PATH.read_text() == corpus.text(), "run testkit/gguf/corpus.py"
    assert sum(case.errors[False] is not None for case in CASES) >= 150


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_each_file_is_read_or_refused(tmp_path: Path, case: GgufCase) -> None:
    path = case.write(tmp_path / "case")
    for lenient, error in case.errors.items():
        if error is not None:
            with pytest.raises((FormatError, CheckpointNotFoundError)) as caught:
                hoistway.load_file(path, framework="raw", lenient=lenient, offset=case.offset)
            assert isinstance(caught.value, CheckpointNotFoundError) == (error == "NotFound")
            assert isinstance(caught.value, TruncatedError) == (error == "Truncated")
            assert Path(caught.value.path).parent == path.parent
            assert str(caught.value.path) in str(caught.value)
            if error in ("Truncated", "Overlap", "Misaligned", "PartialBlock", "Overflow", "RemovedType"):
                assert caught.value.tensor in ("a", "b", "c", "d", "")
            continue
        with hoistway.open(path, framework="raw", lenient=lenient, offset=case.offset) as checkpoint:
            assert_holds(checkpoint, case)


def assert_holds(checkpoint: hoistway.Checkpoint, case: GgufCase) -> None:
    if case.tensors is None:
        return
    found = [(name, checkpoint.get_dtype(name), checkpoint.get_shape(name)) for name in checkpoint.keys()]  # noqa: SIM118
    assert sorted(found) == sorted((name, dtype, shape) for name, dtype, shape, *_ in case.tensors)
    is_big_endian = case.name.startswith("big-endian")
    for name, dtype, _, start, size in case.tensors:
        if dtype.startswith("GGML_") or (is_big_endian and dtype not in ("I8",)):
            with pytest.raises(UnsupportedDtypeError) as caught:
                checkpoint.get_tensor(name)
            assert caught.value.tensor == name
            continue
        data = checkpoint.get_tensor(name).tobytes()
        assert len(data) == size
        # Of split models the files are not told; their tensors have a test of their own.
        assert len(case.files) > 1 or data == case.files[case.open][start : start + size]


def test_metadata_has_the_values_of_the_file_in_its_order(tmp_path: Path) -> None:
    arrays = {f"{kind}s": Array(kind, [value, value]) for kind, value in SCALARS.items()}
    empty = {f"no {kind}s": Array(kind, []) for kind in SCALARS}
    metadata = [(kind, kind, value) for kind, value in SCALARS.items()]
    metadata += [(name, "array", array) for name, array in (arrays | empty).items()]
    for order in ("<", ">"):
        with hoistway.open(write(tmp_path / "m.gguf", metadata=metadata, order=order)) as checkpoint:
            found = checkpoint.metadata()
            assert isinstance(found, Mapping)
            assert list(found) == [name for name, *_ in metadata]
            for kind, value in SCALARS.items():
                assert found[kind] == value
                assert type(found[kind]) is type(value)
                assert found[f"{kind}s"] == [value, value]
                assert found[f"no {kind}s"] == []
                assert found[f"{kind}s"].element == kind
                assert type(found[f"{kind}s"][0]) is type(value)
                if kind != "string":
                    numbers = np.asarray(found[f"{kind}s"])
                    assert numbers.dtype == np.dtype("?" if kind == "bool" else KINDS[kind][1])
                    assert numbers.tolist() == [value, value]
            with pytest.raises(TypeError):
                found["u8"] = 1
            assert "missing" not in found
            with pytest.raises(KeyError):
                found["missing"]


def test_arrays_are_sequences(tmp_path: Path) -> None:
    metadata = [("numbers", "array", Array("i32", range(100))), ("words", "array", Array("string", "abcdef"))]
    path = write(tmp_path / "m.gguf", metadata=metadata)
    with hoistway.open(path) as checkpoint:
        for key, values in (("numbers", list(range(100))), ("words", list("abcdef"))):
            array = checkpoint.metadata()[key]
            assert len(array) == len(values)
            assert list(array) == array.tolist() == values
            assert array[0] == values[0]
            assert array[-1] == values[-1]
            assert array[1:5:2] == values[1:5:2]
            assert list(reversed(array)) == values[::-1]
            assert values[3] in array
            assert array.index(values[3]) == 3
            assert array == values
            assert array != values[1:]
            assert str(len(values)) in repr(array)
            with pytest.raises(IndexError):
                array[len(values)]
        with pytest.raises(TypeError):
            checkpoint.metadata()["words"].numpy()
        assert not checkpoint.metadata()["numbers"].numpy().flags.writeable


def test_arrays_are_read_when_they_are_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", metadata=[(key, "array", Array("u8", [1, 2])) for key in "ab"])
    checkpoint = hoistway.open(path)
    metadata = checkpoint.metadata()
    assert metadata["a"] == [1, 2]
    os.utime(path, ns=(1, 1))
    assert metadata["a"] == [1, 2]
    assert len(metadata["b"]) == 2
    with pytest.raises(FileChangedError):
        metadata["b"].tolist()


def test_arrays_outlive_their_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", metadata=[("a", "array", Array("string", ["x", "y"]))])
    with hoistway.open(path) as checkpoint:
        array = checkpoint.metadata()["a"]
    assert array == ["x", "y"]
    assert array.byte_strings() == [b"x", b"y"]


def test_without_threads_arrays_of_a_server_are_read(tmp_path: Path) -> None:
    """The caller's thread asks the server, and looks for Ctrl-C afterwards."""
    program = """
import os, resource, sys, threading, hoistway

def arrays():
    with hoistway.open(sys.argv[1], framework="raw") as checkpoint:
        metadata = checkpoint.metadata()
        return list(metadata["numbers"]), list(metadata["words"])

before = arrays()
if os.geteuid() == 0:
    user = 1_000_000 + os.getpid()
    os.setresuid(user, user, user)
metadata = hoistway.open(sys.argv[1], framework="raw").metadata()
resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
try:
    threading.Thread(target=int).start()
except RuntimeError:
    pass
else:
    raise SystemExit("a thread was started")
assert (list(metadata["numbers"]), list(metadata["words"])) == before
print(len(before[0]), len(before[1]))
"""
    # Too long to come along with the first bytes.
    words = [f"word {number}" for number in range(150_000)]
    numbers = Array("u32", range(1 << 19))
    metadata = [("numbers", "array", numbers), ("words", "array", Array("string", words))]
    path = write(tmp_path / "m.gguf", metadata=metadata)
    server = Server(path.read_bytes())
    done = run(program, f"http://127.0.0.1:{server.port}/model.gguf")
    server.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(1 << 19), "150000"]


def test_text_that_is_none_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    data = File([("a", "array", Array("string", ["x", b"y\xff"]))]).to_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with hoistway.open(path) as checkpoint:
        array = checkpoint.metadata()["a"]
        assert len(array) == 2
        with pytest.raises(FormatError, match="UTF-8") as caught:
            array.tolist()
        assert Path(caught.value.path) == path
        assert caught.value.offset == data.index(b"\xff")
        assert array.byte_strings() == [b"x", b"y\xff"]


def open_files() -> set[str]:
    """What this process has open."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def test_an_unread_array_keeps_its_own_file_open_and_a_read_one_none(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.gguf", metadata=[(name, "array", Array("u32", [1, 2]))])
        for name in ("a", "b")
    ]
    first, second = (str(path.resolve()) for path in paths)
    with hoistway.open(paths) as checkpoint:
        metadata = checkpoint.metadata()
    array = metadata["a"]
    del metadata
    assert first in open_files()
    assert second not in open_files()
    assert array == [1, 2]
    assert first not in open_files()
    assert array[1] == 2
    assert array.element == "u32"
    assert len(array) == 2


def test_metadata_pickles_and_copies_with_lists_for_arrays(tmp_path: Path) -> None:
    inner = [Array("u8", [1, 2]), Array("string", ["a"])]
    path = write(
        tmp_path / "m.gguf",
        metadata=[
            ("name", "string", "x"),
            ("tokens", "array", Array("string", ["a", "ö"])),
            ("scores", "array", Array("f32", [0.5, -1.0])),
            ("nested", "array", Array("array", inner)),
        ],
    )
    with hoistway.open(path, lenient=True) as checkpoint:
        metadata = checkpoint.metadata()
    expected = {"name": "x", "tokens": ["a", "ö"], "scores": [0.5, -1.0], "nested": [[1, 2], ["a"]]}
    for copied in (pickle.loads(pickle.dumps(metadata)), copy.deepcopy(metadata)):
        assert dict(copied) == expected
        assert list(copied) == list(metadata)
        assert type(copied["tokens"]) is list
        assert type(copied["nested"][0]) is list
    assert pickle.loads(pickle.dumps(metadata["scores"])) == [0.5, -1.0]
    with pytest.raises(TypeError):
        metadata["name"] = "y"


def test_numpy_may_forbid_copies(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        metadata=[("n", "array", Array("i32", [1, 2])), ("s", "array", Array("string", ["a"]))],
    )
    with hoistway.open(path) as checkpoint:
        numbers, strings = checkpoint.metadata()["n"], checkpoint.metadata()["s"]
    assert np.shares_memory(numbers.__array__(copy=False), numbers.numpy())
    assert not np.shares_memory(numbers.__array__(copy=True), numbers.numpy())
    assert numbers.__array__("int32", copy=False).tolist() == [1, 2]
    for array, dtype in ((numbers, "int64"), (strings, None), (strings, object)):
        with pytest.raises(ValueError, match="without a copy"):
            array.__array__(dtype, copy=False)
    with pytest.raises(TypeError, match="not an array of strings"):
        numbers.byte_strings()


def test_arrays_in_arrays_are_read_leniently(tmp_path: Path) -> None:
    inner = [Array("u8", [1, 2]), Array("string", ["a"]), Array("f32", [])]
    path = write(tmp_path / "m.gguf", metadata=[("a", "array", Array("array", inner)), ("b", "bool", 2)])
    with hoistway.open(path, lenient=True) as checkpoint:
        assert checkpoint.metadata()["a"] == [[1, 2], ["a"], []]
        assert checkpoint.metadata()["b"] is True


def test_odd_booleans_are_true_leniently(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", metadata=[("a", "array", Array("bool", [0, 1, 2, 255]))])
    with hoistway.open(path, lenient=True) as checkpoint:
        array = checkpoint.metadata()["a"]
        assert array == [False, True, True, True]
        assert array.numpy().view(np.uint8).tolist() == [0, 1, 1, 1]


def test_threads_may_read_arrays_at_once(tmp_path: Path) -> None:
    values = [f"token {i}" for i in range(20_000)]
    path = write(tmp_path / "m.gguf", metadata=[("a", "array", Array("string", values))])
    with hoistway.open(path) as checkpoint:
        metadata = checkpoint.metadata()
        found: list[list[str]] = []
        threads = [threading.Thread(target=lambda: found.append(list(metadata["a"]))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [values] * 4


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "raw"])
def test_every_type_has_its_bytes(every_type: tuple[Path, list[Tensor]], framework: str) -> None:
    path, tensors = every_type
    with hoistway.open(path, framework=framework) as checkpoint:
        assert checkpoint.keys() == [tensor.name for tensor in tensors]
        # Without its own 64-bit types, jax warns of numbers that fit no narrower one.
        loaded = checkpoint.load(exclude="[IF]64" if framework == "jax" else None)
        for tensor in tensors:
            if tensor.name not in loaded:
                continue
            assert checkpoint.get_dtype(tensor.name) == tensor.type
            assert checkpoint.get_shape(tensor.name) == tensor.shape
            found = loaded[tensor.name]
            if framework == "raw":
                assert (found.dtype, list(found.shape)) == (tensor.type, tensor.shape)
                assert found.tobytes() == tensor.data
                continue
            if tensor.type in PLAIN:
                assert list(found.shape) == tensor.shape
            else:
                assert list(found.shape) == list(expected_array(tensor).shape)
                assert str(found.dtype).removeprefix("torch.") == "uint8"
            if framework == "torch":
                found = found.contiguous().view(torch.uint8).numpy()
            assert np.asarray(found).tobytes() == tensor.data


@pytest.mark.parametrize(
    "options",
    [
        {"route": "io_uring"},
        {"route": "threads", "direct": "never"},
        {"route": "mapped"},
        {"layout": "packed"},
        {"layout": "tensor", "chunk": "4KiB"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_every_route_and_layout_delivers_the_bytes(
    every_type: tuple[Path, list[Tensor]], options: dict[str, str]
) -> None:
    path, tensors = every_type
    make_cold(path)
    loaded = hoistway.load_file(path, framework="raw", **options)
    assert {name: tensor.tobytes() for name, tensor in loaded.items()} == {
        tensor.name: tensor.data for tensor in tensors
    }


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("options", [{}, {"layout": "packed"}, {"dtype": torch.float16}], ids=str)
def test_every_type_gets_to_a_device(every_type: tuple[Path, list[Tensor]], options: dict) -> None:
    path, tensors = every_type
    # A conversion leaves integers and blocks as they are, and refuses F64.
    converts = "dtype" in options
    loaded = hoistway.load_file(path, "cuda", framework="raw", exclude="F64" if converts else None, **options)
    for tensor in tensors:
        if converts and tensor.type in ("F32", "BF16", "F64"):
            assert tensor.name not in loaded or loaded[tensor.name].dtype == "F16"
            continue
        found = loaded[tensor.name]
        assert found.dtype == tensor.type
        assert found.tobytes() == tensor.data


def test_slices_of_quantised_tensors_end_between_blocks(every_type: tuple[Path, list[Tensor]]) -> None:
    path, tensors = every_type
    with hoistway.open(path, framework="numpy") as checkpoint:
        for tensor in tensors:
            if tensor.type in PLAIN:
                continue
            whole = expected_array(tensor)
            kind = TYPES[tensor.type]
            part = checkpoint.get_slice(tensor.name)
            for index in (np.s_[1:], np.s_[:2, 1], np.s_[0], np.s_[-1, 0], np.s_[::2], np.s_[..., :]):
                np.testing.assert_array_equal(part[index], whole[index])
            for first, last in ((0, 1), (1, 3), (2, 4), (0, 0), (4, 4)):
                found = part[:, :, first * kind.elements : last * kind.elements]
                np.testing.assert_array_equal(found, whole[:, :, first * kind.bytes : last * kind.bytes])
            for last in (
                np.s_[1:],
                np.s_[: kind.elements + 1],
                np.s_[kind.elements // 2 : kind.elements],
                0,
                np.s_[::2],
            ):
                with pytest.raises(SliceError) as caught:
                    part[:, :, last]
                assert caught.value.tensor == tensor.name


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = [filled("scalar", [], "F32"), Tensor("empty", [4, 0], "F16"), Tensor("blocks", [3, 0], "Q4_K")]
    path = write(tmp_path / "m.gguf", *tensors, filled("last", [5], "I8"))
    loaded = hoistway.load_file(path, framework="numpy")
    assert {name: tensor.shape for name, tensor in loaded.items()} == {
        "scalar": (),
        "empty": (4, 0),
        "blocks": (3, 0),
        "last": (5,),
    }
    assert loaded["scalar"].tobytes() == tensors[0].data


def test_selections_iteration_and_reports(every_type: tuple[Path, list[Tensor]]) -> None:
    path, tensors = every_type
    names = {tensor.name for tensor in tensors}
    with hoistway.open(path, framework="raw") as checkpoint:
        assert set(checkpoint.load(select="IQ*")) == {name for name in names if name.startswith("IQ")}
        assert {name for name, _ in checkpoint} == names
        whole = hoistway.load_file(path, framework="raw").report
        assert whole.tensor_bytes == sum(tensor.size for tensor in tensors)
        assert set(checkpoint.manifest()["tensors"]) == names
        assert checkpoint.warm()["bytes"] == path.stat().st_size
        with pytest.raises(hoistway.errors.TensorNotFoundError, match="did you mean"):
            checkpoint.get_tensor("Q4_J")


def test_types_to_come_are_listed_and_can_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", Tensor("new", [32], 99, data=bytes(64)), filled("old", [8]))
    with hoistway.Reader(path, framework="raw") as reader, pytest.raises(UnsupportedDtypeError, match="99"):
        reader.read("new")
    with hoistway.open(path, framework="numpy") as checkpoint:
        assert checkpoint.keys() == ["new", "old"]
        assert checkpoint.get_shape("new") == [32]
        with pytest.raises(UnsupportedDtypeError, match="99") as caught:
            checkpoint.load()
        assert caught.value.tensor == "new"
        assert list(checkpoint.load(exclude="new")) == ["old"]


def test_elements_of_the_other_byte_order_are_refused(tmp_path: Path) -> None:
    tensors = [filled("bytes", [32], "I8"), filled("numbers", [8]), filled("blocks", [32], "Q8_0")]
    path = write(tmp_path / "m.gguf", *tensors, metadata=[("a", "u32", 7)], order=">")
    with hoistway.open(path, framework="numpy") as checkpoint:
        assert checkpoint.metadata()["a"] == 7
        assert checkpoint.get_tensor("bytes").tobytes() == tensors[0].data
        for name in ("numbers", "blocks"):
            with pytest.raises(UnsupportedDtypeError, match="big-endian"):
                checkpoint.get_tensor(name)
        with hoistway.Reader(checkpoint, framework="numpy") as reader:
            assert reader.read("bytes")["bytes"].tobytes() == tensors[0].data
            for wanted in ("numbers", ["bytes", "blocks"]):
                with pytest.raises(UnsupportedDtypeError, match="big-endian"):
                    reader.read(wanted)
            with pytest.raises(UnsupportedDtypeError, match="big-endian") as caught:
                reader.read("numbers", slices={"numbers": slice(2, 4)})
            assert caught.value.tensor == "numbers"


def test_all_that_reads_tensors_refuses_the_other_byte_order(tmp_path: Path) -> None:
    weights = [filled(f"blk.0.ffn_{part}_exps.weight", [2, 64, 64]) for part in ("gate", "up", "down")]
    path = write(tmp_path / "m.gguf", filled("blk.0.attn_q.weight", [4, 8]), *weights, order=">")
    doors: list[Callable[[], object]] = [
        lambda: hoistway.stream_layers(path, framework="numpy", budget="1MiB"),
        lambda: Rows(path, "blk.0.attn_q.weight", framework="numpy"),
        lambda: ExpertStore.open(path, budget="1MiB", framework="numpy", top_k=1),
    ]
    for door in doors:
        with pytest.raises(UnsupportedDtypeError, match="big-endian"):
            door()


def split_model(directory: Path, stem: str = "m", count: int = 3) -> tuple[list[Path], list[Tensor]]:
    """A model in several files, the first of which has keys alone."""
    directory.mkdir(exist_ok=True)
    tensors = [filled(f"t{i}", [i, 32], "Q8_0", i) for i in range(1, 2 * count - 1)]
    paths = []
    for number in range(count):
        metadata = [("split.no", "u16", number), ("split.count", "u16", count)]
        metadata += [("split.tensors.count", "i32", len(tensors))]
        if number == 0:
            metadata = [("general.name", "string", stem), *metadata]
        own = tensors[2 * number - 2 : 2 * number] if number else []
        path = directory / f"{stem}-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write(path, *own, metadata=metadata))
    return paths, tensors


def test_any_file_of_a_split_model_stands_for_all(tmp_path: Path) -> None:
    paths, tensors = split_model(tmp_path / "model")
    ways = [*paths, paths, paths[::-1], paths[0].parent, paths[0].parent / "*.gguf"]
    for way in ways:
        with hoistway.open(way, framework="raw") as checkpoint:
            assert checkpoint.files() == [str(path) for path in paths]
            assert checkpoint.metadata()["general.name"] == "m"
            loaded = checkpoint.load()
        assert {name: tensor.tobytes() for name, tensor in loaded.items()} == {
            tensor.name: tensor.data for tensor in tensors
        }


def test_a_missing_file_of_a_split_model_is_named(tmp_path: Path) -> None:
    paths, _ = split_model(tmp_path / "model")
    paths[1].unlink()
    for path in (paths[0], paths[2], paths[0].parent):
        with pytest.raises(CheckpointNotFoundError, match=paths[1].name):
            hoistway.open(path)


def test_directories_hold_one_model(tmp_path: Path) -> None:
    directory = tmp_path / "models"
    one, _ = split_model(directory, "one")
    assert hoistway.open(directory).files() == [str(path) for path in one]
    write(directory / "two.gguf", filled("a", [1]))
    with pytest.raises(CheckpointNotFoundError, match=r"two\.gguf"):
        hoistway.open(directory)


def test_safetensors_come_first_in_a_directory(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "m.gguf", filled("a", [1]))
    assert hoistway.open(tmp_path).files() == [str(model)]


def test_content_says_which_format_it_is(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "m.bin", filled("a", [4]))
    assert hoistway.open(path).keys() == ["a"]
    renamed = model.rename(tmp_path / "model.gguf")
    assert "embed" in hoistway.open(renamed)


def test_embedded_files_and_leniency_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = filled("a", [32, 32], "Q4_0")
    file = File([("general.alignment", "u32", 4)], [tensor], alignment=4)
    path = tmp_path / "m.bin"
    path.write_bytes(b"x" * 4099 + file.to_bytes())
    loaded = hoistway.load_file(path, framework="raw", offset=4099, lenient=True)
    assert loaded["a"].tobytes() == tensor.data
    with pytest.raises(FormatError, match="alignment"):
        hoistway.load_file(path, offset=4099)
    monkeypatch.setenv("HOISTWAY_LENIENT", "true")
    assert hoistway.load_file(path, framework="raw", offset=4099)["a"].tobytes() == tensor.data
    with pytest.raises(FormatError):
        hoistway.load_file(path, offset=4099, lenient=False)
    monkeypatch.setenv("HOISTWAY_LENIENT", "perhaps")
    assert "a" in hoistway.load_file(path, framework="raw", offset=4099, lenient=True)
    with pytest.raises(OptionError, match="HOISTWAY_LENIENT"):
        hoistway.load_file(path, offset=4099)


def test_files_that_change_after_opening(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", filled("a", [4096, 32], "Q8_0"))
    checkpoint = hoistway.open(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(TruncatedError) as caught:
        checkpoint.load()
    assert caught.value.tensor == "a"
    write(path, filled("a", [4096, 32], "Q8_0", seed=1))
    with pytest.raises((FileChangedError, TruncatedError)):
        checkpoint.load()


def test_files_at_the_limits_are_taken(tmp_path: Path) -> None:
    limit = 64 << 20
    path = tmp_path / "m.gguf"
    for count, error in ((limit, None), (limit + 1, FormatError)):
        head = File([("a", "array", Array("i8", [], count))], alignment=1).head()
        path.write_bytes(head)
        os.truncate(path, len(head) + count)
        if error is None:
            with hoistway.open(path) as checkpoint:
                assert len(checkpoint.metadata()["a"]) == limit
        else:
            with pytest.raises(error, match=str(limit)):
                hoistway.open(path)


def test_lies_cost_no_memory(tmp_path: Path) -> None:
    for number, case in enumerate(CASES):
        if case.errors[True] is not None and sum(map(len, case.files.values())) < 1 << 20:
            case.write(tmp_path / f"{number}")
    script = """
        import resource, sys
        from pathlib import Path
        import hoistway
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        files = sorted(Path(sys.argv[1]).glob("*/*"))
        try:
            hoistway.open(files[0], framework="raw")
        except hoistway.errors.HoistwayError:
            pass
        before = peak()
        # Far less than any number in these files asks for.
        limit = (1 << 30) + (int(open("/proc/self/statm").read().split()[0]) << 12)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        refused = 0
        for file in files:
            for lenient in (False, True):
                try:
                    hoistway.open(file, framework="raw", lenient=lenient)
                except hoistway.errors.HoistwayError:
                    refused += 1
        print(len(files), refused, peak() - before)
    """
    # One arena of malloc's: each would take 64 MiB of the address space, and split models are opened by many threads.
    done = run(script, tmp_path, MALLOC_ARENA_MAX="1")
    assert done.returncode == 0, done.stderr
    files, refused, growth = map(int, done.stdout.split())
    assert refused > files > 130
    assert growth < 16, f"{growth} MiB"


def test_a_large_vocabulary_is_opened_in_little_memory(tmp_path: Path) -> None:
    count = 262_144
    # Tokens of 0 to 127 bytes: about as much as in the largest vocabularies.
    tokens = ["ü" * (i % 32) + f"{i}" for i in range(count)]
    metadata = [
        ("tokenizer.ggml.tokens", "array", Array("string", tokens)),
        ("tokenizer.ggml.scores", "array", Array("f32", [0.5] * count)),
        ("tokenizer.ggml.token_type", "array", Array("i32", [1] * count)),
    ]
    path = write(tmp_path / "vocabulary.gguf", metadata=metadata)
    assert path.stat().st_size > 10 << 20
    script = """
        import resource, sys
        import hoistway
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        hoistway.open(sys.argv[2], framework="raw").metadata()
        before = peak()
        metadata = hoistway.open(sys.argv[1], framework="raw").metadata()
        print(peak() - before)
        tokens = metadata["tokenizer.ggml.tokens"]
        print(len(tokens), len(tokens[:]), tokens[-1], sum(metadata["tokenizer.ggml.scores"]))
    """
    small = write(tmp_path / "small.gguf", metadata=metadata[1:])
    done = run(script, path, small)
    assert done.returncode == 0, done.stderr
    growth, values = done.stdout.splitlines()
    assert int(growth) < 4, f"{growth} MiB"
    assert values == f"{count} {count} {tokens[-1]} {math.fsum([0.5] * count)}"
