"""Thousands of random calls give what fastsafetensors 0.5 gives, on one rank and in host memory."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hoistway
import hoistway.compat.fastsafetensors as ours
import pytest
import torch
from conftest import BITS, header_cases, write_model

theirs = pytest.importorskip("fastsafetensors")
their_types = pytest.importorskip("fastsafetensors.st_types")

DTYPES = [dtype for dtype in their_types.DType.__members__ if dtype != "AUTO"]
FLOATS = ["F64", "F32", "F16", "BF16"]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    plain = tensor.view(torch.uint8) if narrow else tensor
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def told(value: Any) -> Any:
    """What can be compared of a result."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), raw_bytes(value)
    if hasattr(value, "get_raw"):
        return (
            value.dtype.value,
            value.device.as_str(),
            value.get_shape(),
            value.get_nbytes(),
            told(value.get_raw()),
        )
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(item) for item in value]
    return value


def outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return told(call()), None
    except Exception as error:
        return None, error


def compare(what: str, own: Callable[[], Any], reference: Callable[[], Any]) -> None:
    """Results are the same, or both fail, ours in a way that those who expect theirs notice."""
    expected, their_error = outcome(reference)
    got, our_error = outcome(own)
    if their_error is None:
        assert our_error is None, f"{what}: {our_error!r}"
        assert got == expected, what
    else:
        assert our_error is not None, f"{what}: they fail with {their_error!r}"
        for kind in (ValueError, KeyError, FileNotFoundError, IndexError):
            # Plain exceptions can become any kind.
            if type(their_error) is kind:
                assert isinstance(our_error, kind), f"{what}: {our_error!r} instead of {their_error!r}"


def random_shape(pick: random.Random, dtype: str) -> list[int]:
    shape = [pick.choice([0, 1, 1, 2, 3, 4, 5, 7]) for _ in range(pick.choice([0, 1, 1, 2, 2, 2, 3]))]
    if dtype == "F4":
        shape = [*shape[:-1], (shape[-1] if shape else 1) * 2]
    return shape


def random_files(pick: random.Random, directory: Path) -> list[str]:
    """Files with tensors of all types; some share a shape, so that they can be joined."""
    paths = []
    number = 0
    for file in range(pick.choice([1, 1, 2, 3])):
        tensors: dict[str, tuple[str, list[int]]] = {}
        for _ in range(pick.choice([1, 2, 5, 12])):
            dtype = pick.choice(DTYPES)
            shape = random_shape(pick, dtype)
            for _ in range(pick.choice([1, 1, 3])):
                other = pick.choice([dtype, dtype, *DTYPES])
                own = dtype if "F4" in (dtype, other) else other
                tensors[f"layer.{number % 3}.experts.{number}.w"] = own, shape
                number += 1
        metadata = pick.choice([None, {"format": "pt"}])
        path = write_model(
            directory / f"{file}.safetensors",
            tensors,
            metadata=metadata,
            padding=8 * pick.randrange(3),
            seed=pick.getrandbits(32),
        )
        paths.append(str(path))
    return paths


class Pair:
    """The same files in both libraries."""

    def __init__(self, pick: random.Random, paths: list[str]) -> None:
        self.pick = pick
        self.paths = paths
        self.keep = pick.choice([None, None, lambda name: int(name.split(".")[3]) % 3 > 0])
        self.loaders = [self.loader(ours), self.loader(theirs)]
        self.names = self.loaders[1].get_keys()
        widest = min((BITS[dtype] for dtype in self.dtypes()), default=64)
        fitting = [dtype for dtype in FLOATS if BITS[dtype] <= widest]
        self.dtype = pick.choice(["AUTO", "AUTO", *fitting])
        self.buffers = [
            self.loaders[0].copy_files_to_device(dtype=ours.DType[self.dtype]),
            self.loaders[1].copy_files_to_device(dtype=their_types.DType[self.dtype]),
        ]

    def loader(self, library: Any) -> Any:
        loader = library.SafeTensorsFileLoader(None, "cpu", nogds=True, max_threads=2)
        loader.set_tensor_filter(self.keep)
        loader.add_filenames({0: self.paths})
        return loader

    def dtypes(self) -> list[str]:
        return [frame.dtype.value for frame in self.loaders[1].frames.values()]

    def both(self, what: str, call: Callable[[Any, Any], Any]) -> None:
        compare(
            f"{what} of {self.names} as {self.dtype} in {self.paths}",
            lambda: call(self.buffers[0], ours.DType),
            lambda: call(self.buffers[1], their_types.DType),
        )

    def call_once(self) -> None:
        pick = self.pick
        name = pick.choice([*self.names, "absent"])
        dim = pick.choice([-1, 0, 0, 1, 2])
        dtype = pick.choice(["AUTO", "AUTO", "AUTO", *FLOATS, "I32", "F8_E5M2"])
        kind = pick.randrange(8)
        if kind == 0:
            self.both(f"get_tensor({name}, {dtype})", lambda b, d: b.get_tensor(name, dtype=d[dtype]))
        elif kind == 1:
            self.both(f"get_tensor_wrapped({name})", lambda b, d: b.get_tensor_wrapped(name, None, d[dtype]))
        elif kind == 2:
            self.both(f"get_sharded({name}, {dim})", lambda b, d: b.get_sharded(name, dim, dtype=d[dtype]))
        elif kind == 3:
            alike = self.alike(name)
            self.both(f"get_multi_cols({alike}, {dim})", lambda b, _: b.get_multi_cols(alike, max(dim, 0)))
            # Of promoted tensors theirs says that they are of the first one's type, so the tensors alone are compared.
            mixed = self.mixed(name)
            self.both(
                f"get_multi_cols({mixed}, {dim})", lambda b, _: b.get_multi_cols(mixed, max(dim, 0)).get_raw()
            )
        elif kind == 4:
            wanted = dict.fromkeys(pick.sample(self.names, min(3, len(self.names))), dim)
            self.both(f"as_dict({wanted})", lambda b, _: b.as_dict(wanted))
        elif kind == 5:
            self.both(f"push_tensor({name})", lambda b, d: b.push_tensor(name, 0, dtype=d[dtype]))
        elif kind == 6:
            self.both(f"get_filename({name})", lambda b, _: (b.get_filename(name), b.get_shape(name)))
        else:
            some = pick.sample(self.names, min(2, len(self.names)))
            self.both(f"iter_local_tensors({some})", lambda b, _: list(b.iter_local_tensors(some)))

    def alike(self, name: str) -> list[str]:
        """Tensors of one type, as those are that are fused."""
        frames = self.loaders[1].frames
        if name not in frames:
            return [name]
        # An empty vector torch joins with any shape, and ours with its own alone.
        kinds = {other: (frame.dtype, frame.shape == [0]) for other, frame in frames.items()}
        found = [other for other in self.names if kinds[other] == kinds[name]]
        return self.pick.sample(found, self.pick.randint(1, min(3, len(found))))

    def mixed(self, name: str) -> list[str]:
        """Tensors of one shape; but for the types whose bytes theirs joins with whatever follows."""
        frames = self.loaders[1].frames
        if name not in frames:
            return [name]
        kinds = {
            other: (frame.shape, frame.dtype.value not in ("F4", "F8_E8M0"))
            for other, frame in frames.items()
        }
        found = [other for other in self.names if kinds[other] == (frames[name].shape, True)]
        return self.pick.sample(found, min(3, len(found))) or [name]

    def close(self) -> None:
        for each in (*self.buffers, *self.loaders):
            each.close()


def test_random_calls_give_the_same(tmp_path: Path) -> None:
    pick = random.Random(2026)
    for round_number in range(120):
        directory = tmp_path / str(round_number)
        directory.mkdir()
        pair = Pair(pick, random_files(pick, directory))
        assert pair.loaders[0].get_keys() == pair.names
        for name in pair.names:
            assert pair.loaders[0].get_shape(name) == pair.loaders[1].get_shape(name)
        for _ in range(40):
            pair.call_once()
        pair.close()


def test_files_of_several_ranks_are_named_in_the_same_order(tmp_path: Path) -> None:
    pick = random.Random(5)
    paths = [str(write_model(tmp_path / f"{i}.safetensors", {f"t{i}": ("U8", [1])})) for i in range(9)]
    for _ in range(20):
        pick.shuffle(paths)
        cut = sorted(pick.choices(range(10), k=2))
        by_rank = {2: paths[: cut[0]], 0: paths[cut[0] : cut[1]], 1: paths[cut[1] :]}
        loaders = [
            library.SafeTensorsFileLoader(None, "cpu", nogds=True, max_threads=1)
            for library in (ours, theirs)
        ]
        for loader in loaders:
            loader.add_filenames(by_rank)
        assert loaders[0].get_keys() == loaders[1].get_keys()


def test_conversions_that_they_refuse_are_refused(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "m.safetensors", {"a": ("BF16", [3]), "b": ("U8", [2, 0])}))
    for dtype in DTYPES:

        def converted(library: Any, types: Any, dtype: str = dtype) -> Any:
            loader = library.SafeTensorsFileLoader(None, "cpu", nogds=True, max_threads=2)
            loader.add_filenames({0: [path]})
            buffer = loader.copy_files_to_device(dtype=types[dtype])
            return [buffer.get_tensor(name) for name in "ab"]

        # Packing is neither theirs nor ours; they fail later, in torch.
        compare(dtype, lambda: converted(ours, ours.DType), lambda: converted(theirs, their_types.DType))


def test_weights_come_in_the_same_order(tmp_path: Path) -> None:
    pick = random.Random(7)
    for round_number in range(30):
        directory = tmp_path / str(round_number)
        directory.mkdir()
        paths = random_files(pick, directory)
        pick.shuffle(paths)
        options = pick.choice([{}, {"queue_size": -1}, {"queue_size": 2}, {"max_batch_bytes": 4096}])
        keep = pick.choice([None, ours.expert_parallel_filter(20, 3, 1)])

        def weights(library: Any) -> list[tuple[str, Any]]:
            loader = library.ParallelLoader(
                None,
                paths,  # noqa: B023
                use_tqdm_on_load=False,
                nogds=True,
                max_threads=2,
                tensor_filter=keep,  # noqa: B023
                **options,  # noqa: B023
            )
            found = [(name, told(tensor)) for name, tensor in loader.iterate_weights()]
            loader.close()
            return found

        assert weights(ours) == weights(theirs), (paths, options)


def test_opened_files_say_the_same(tmp_path: Path) -> None:
    pick = random.Random(11)
    for round_number in range(10):
        directory = tmp_path / str(round_number)
        directory.mkdir()
        paths = random_files(pick, directory)
        files: Any = pick.choice([paths, paths[0], {0: paths}])
        with (
            ours.fastsafe_open(files, nogds=True) as mine,
            theirs.fastsafe_open(files, nogds=True) as other,
        ):
            names = mine.keys()
            assert names == other.keys()
            assert mine.metadata() == other.metadata()
            for name in names:
                assert told(mine.get_tensor(name)) == told(other.get_tensor(name))
                assert told(mine.get_tensor_wrapped(name)) == told(other.get_tensor_wrapped(name))


def test_headers_say_the_same(tmp_path: Path) -> None:
    pick = random.Random(13)
    framework = theirs.SafeTensorsFileLoader(None, "cpu", nogds=True, max_threads=1).framework
    for round_number in range(40):
        directory = tmp_path / str(round_number)
        directory.mkdir()
        for path in random_files(pick, directory):
            mine, other = (
                ours.SafeTensorsMetadata.from_file(path),
                theirs.SafeTensorsMetadata.from_file(path, framework),
            )
            for field in ("src", "metadata", "header_length", "size_bytes", "aligned"):
                assert getattr(mine, field) == getattr(other, field)
            assert list(mine.tensors) == list(other.tensors)
            gap = pick.choice([0, 1, 4, 4096])
            some = set(pick.sample(list(mine.tensors), len(mine.tensors) // 2))
            ranges = [metadata.select_byte_ranges(some.__contains__, gap) for metadata in (mine, other)]
            assert ranges[0] == ranges[1]
            for name, frame in mine.tensors.items():
                assert_frames_are_alike(pick, frame, other.tensors[name])


def assert_frames_are_alike(pick: random.Random, mine: Any, other: Any) -> None:
    for field in ("shape", "data_offsets", "strides", "offsets", "sliced"):
        assert getattr(mine, field) == getattr(other, field)
    index = tuple(
        pick.choice(
            [
                slice(None),
                pick.randint(-size - 1, size),
                slice(pick.randint(-2, 2), None, pick.choice([1, 2, -1])),
            ]
        )
        for size in mine.shape
    )
    part, error = outcome(lambda: mine[index])
    expected, their_error = outcome(lambda: other[index])
    assert (error is None) == (their_error is None), index
    if error is None:
        for field in ("shape", "data_offsets", "strides", "offsets", "sliced"):
            assert getattr(part, field) == getattr(expected, field), index


def test_empty_parts_of_frames_are_theirs() -> None:
    entry = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}
    library = pytest.importorskip("fastsafetensors.common")
    mine, other = (kind.from_buffer(entry) for kind in (ours.TensorFrame, library.TensorFrame))
    # The last: once a part is empty, what follows is not looked at.
    for index in (slice(2, 2), (slice(None), slice(3, 1)), slice(0, 2, -1), (slice(4, 9), 7)):
        part, expected = mine[index], other[index]
        assert (part.shape, part.strides, part.offsets, part.sliced) == ([], [], [], False)
        assert (expected.shape, expected.strides, expected.offsets, expected.sliced) == ([], [], [], False)


def test_headers_are_held_to_the_rules_of_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "case.safetensors"
    for name, file, error in header_cases():
        path.write_bytes(file)
        _, found = outcome(lambda: ours.SafeTensorsMetadata.from_file(str(path)))
        assert (found is None) == (error is None), f"{name}: {found!r}"
        assert found is None or (isinstance(found, ValueError) and os.fspath(found.path) == str(path)), name
        in_memory = ctypes.create_string_buffer(file, len(file))
        _, found = outcome(
            lambda: ours.SafeTensorsMetadata.from_buffer(ctypes.addressof(in_memory), len(file), "memory")  # noqa: B023
        )
        assert (found is None) == (error is None), f"{name} in memory: {found!r}"


def test_padding_after_the_data_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("F32", [3]), "b": ("U8", [5])})
    path.write_bytes(path.read_bytes() + bytes(4096))
    framework = theirs.SafeTensorsFileLoader(None, "cpu", nogds=True, max_threads=1).framework
    other = theirs.SafeTensorsMetadata.from_file(str(path), framework)
    for call in (
        lambda: ours.SafeTensorsMetadata.from_file(str(path)),
        lambda: ours.SafeTensorsFileLoader(None, nogds=True).add_filenames({0: [str(path)]}),
        lambda: ours.ParallelLoader(None, [str(path)], nogds=True),
    ):
        with pytest.raises(ValueError, match="open it with lenient"):
            call()
    mine = ours.SafeTensorsMetadata.from_file(str(path), lenient=True)
    assert list(mine.tensors) == list(other.tensors)
    assert mine.size_bytes == other.size_bytes
    loader = theirs.ParallelLoader(None, [str(path)], use_tqdm_on_load=False, nogds=True)
    expected = {name: told(tensor) for name, tensor in loader.iterate_weights()}
    loader.close()
    lenient = ours.ParallelLoader(None, [str(path)], use_tqdm_on_load=False, nogds=True, lenient=True)
    assert {name: told(tensor) for name, tensor in lenient.iterate_weights()} == expected
    lenient.close()
    files = ours.SafeTensorsFileLoader(None, nogds=True, lenient=True)
    files.add_filenames({0: [str(path)]})
    buffer = files.copy_files_to_device()
    assert {name: told(buffer.get_tensor(name)) for name in files.get_keys()} == expected
    loaded = hoistway.load_file(path, lenient=True)
    assert {name: told(tensor) for name, tensor in loaded.items()} == expected
