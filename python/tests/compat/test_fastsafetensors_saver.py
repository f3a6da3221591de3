"""Saving as many files as one asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hoistway
import hoistway.compat.fastsafetensors as fst
import hoistway.compat.fastsafetensors.saver
import pytest
import torch
from conftest import same_bytes
from hoistway.compat.fastsafetensors.saver import WriteEntry, per_entry_fill, plain_entry, tensor_fill


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {"large": (300, 100), "mid": (100, 100), "small": (10,), "empty": (0, 3)}
    made = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return {
        **made,
        "scalar": torch.tensor(7),
        "turned": made["mid"].t(),
        "f8": made["mid"].to(torch.float8_e4m3fn),
        "f4": torch.zeros(4, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    base = str(tmp_path / "new" / "model")
    paths = fst.ParallelSaver(num_shards=3, num_threads=2).save(tensors(), base, metadata={"format": "pt"})
    assert paths == [f"{base}-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    loaded = hoistway.load_file(paths)
    assert set(loaded) == set(tensors())
    for name, tensor in tensors().items():
        if name == "f4":
            assert loaded[name].view(torch.uint8).eq(0).all()
        else:
            assert same_bytes(loaded[name], tensor.contiguous()), name
    largest = [sum(tensor.nbytes for tensor in hoistway.load_file(path).values()) for path in paths]
    assert max(largest) == tensors()["large"].nbytes, "the largest tensor has a file of its own"


def test_fastsafetensors_knows_the_files_as_one_set(tmp_path: Path) -> None:
    saver = pytest.importorskip("fastsafetensors.saver")
    theirs = pytest.importorskip("fastsafetensors")
    paths = fst.ParallelSaver(num_shards=2).save(tensors(), str(tmp_path / "model"))
    framework = theirs.SafeTensorsFileLoader(None, nogds=True, max_threads=1).framework
    saver.validate_shard_set([theirs.SafeTensorsMetadata.from_file(path, framework) for path in paths])


def test_files_carry_their_texts(tmp_path: Path) -> None:
    def counted(entries: Sequence[Any]) -> dict[str, str]:
        return {"tensors": str(len(entries)), "bytes": str(sum(entry.nbytes for entry in entries))}

    saver = fst.ParallelSaver(num_shards=2, shard_metadata=counted)
    paths = saver.save(
        tensors(),
        str(tmp_path / "m"),
        metadata={"a": "all"},
        shard0_metadata={"b": "first"},
        header_align=4096,
    )
    for number, path in enumerate(paths):
        metadata = fst.SafeTensorsMetadata.from_file(path)
        assert metadata.header_length % 4096 == 0
        assert metadata.metadata["a"] == "all"
        assert ("b" in metadata.metadata) == (number == 0)
        assert metadata.metadata["tensors"] == str(len(metadata.tensors))
    with pytest.raises(ValueError, match=r"fst\.shard\.set"):
        fst.ParallelSaver(shard_metadata=lambda _: {"fst.shard.set": "mine"}).save({}, str(tmp_path / "x"))


@pytest.mark.parametrize("options", [{"num_shards": 0}, {"num_threads": 0}, {"framework": "tensorflow"}])
def test_what_cannot_be_done_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        fst.ParallelSaver(**options)


def test_space_that_is_not_there_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="left over"):
        fst.ParallelSaver(min_free_bytes=1 << 62).save(tensors(), str(tmp_path / "m"))
    assert not list(tmp_path.iterdir())


def entries_of(library: Any, dtypes: Any) -> list[Any]:
    """Entries whose sources only an encoder knows, one without bytes among them."""
    shapes = {"a": [3, 5], "b": [2000], "c": [0, 4], "d": [], "e": [7]}
    return [
        library.WriteEntry(name, dtypes.I16, shape, 2 * int(torch.Size(shape).numel()), source=number)
        for number, (name, shape) in enumerate(shapes.items())
    ]


def encoder(seen: list[Any]) -> Any:
    def fill(work: list[tuple[memoryview, Any]]) -> None:
        seen.append([(entry.name, len(buffer), entry.source) for buffer, entry in work])
        for buffer, entry in work:
            buffer[:] = bytes((entry.source + place) % 251 for place in range(len(buffer)))

    return fill


def test_an_encoder_of_ones_own_writes_what_it_writes_for_fastsafetensors(tmp_path: Path) -> None:
    theirs = pytest.importorskip("fastsafetensors.saver")
    types = pytest.importorskip("fastsafetensors.st_types")
    seen: list[Any] = []
    options = {"num_shards": 2, "fill": encoder(seen), "fsync": True}
    mine = fst.ParallelSaver(**options).save_entries(
        entries_of(fst.saver, fst.DType), str(tmp_path / "mine"), metadata={"a": "b"}, header_align=64
    )
    others = theirs.ParallelSaver(**options).save_entries(
        entries_of(theirs, types.DType), str(tmp_path / "theirs"), metadata={"a": "b"}, header_align=64
    )
    assert seen[0] == seen[1], "called once, with the largest first"
    for path, other in zip(mine, others, strict=True):
        loaded, expected = hoistway.load_file(path), hoistway.load_file(other)
        assert loaded.keys() == expected.keys()
        assert all(same_bytes(loaded[name], expected[name]) for name in loaded)
        assert fst.SafeTensorsMetadata.from_file(path).metadata["a"] == "b"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        Path(each).name for each in [*mine, *others]
    )


def test_sources_are_given_to_encoders_as_they_are(tmp_path: Path) -> None:
    given = {"turned": torch.arange(6.0).reshape(2, 3).t(), "plain": torch.arange(4)}
    sources: dict[str, Any] = {}

    def encode(buffer: memoryview, entry: WriteEntry) -> None:
        sources[entry.name] = entry.source
        buffer[:] = entry.source.contiguous().numpy().tobytes()

    for fill in (per_entry_fill(encode), per_entry_fill(encode, 1), tensor_fill(2), None):
        paths = fst.ParallelSaver(num_shards=1, fill=fill).save(given, str(tmp_path / "m"))
        loaded = hoistway.load_file(paths)
        assert all(same_bytes(loaded[name], tensor.contiguous()) for name, tensor in given.items())
    assert all(sources[name] is tensor for name, tensor in given.items())


def test_buffers_of_encoders_have_their_room_before_they_are_written(tmp_path: Path) -> None:
    allocated: list[int] = []

    def fill(work: list[tuple[memoryview, Any]]) -> None:
        for descriptor in Path("/proc/self/fd").iterdir():
            # The one that lists them is gone by now.
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(descriptor).startswith(str(tmp_path)):
                    allocated.append(descriptor.stat().st_blocks * 512)

    entry = WriteEntry("a", fst.DType.U8, [1 << 20], 1 << 20)
    fst.ParallelSaver(num_shards=1, fill=fill).save_entries([entry], str(tmp_path / "m"))
    assert allocated
    assert min(allocated) >= 1 << 20


def test_the_error_of_an_encoder_that_looks_at_its_buffers_comes_through(tmp_path: Path) -> None:
    def fail(work: list[tuple[memoryview, Any]]) -> None:
        # The traceback keeps them.
        seen = [memoryview(buffer) for buffer, _ in work]
        raise ZeroDivisionError(len(seen))

    entries = [WriteEntry(name, fst.DType.U8, [100], 100) for name in "ab"]
    with pytest.raises(ZeroDivisionError):
        fst.ParallelSaver(num_shards=1, fill=fail).save_entries(entries, str(tmp_path / "m"))


def test_an_encoder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(work: list[tuple[memoryview, Any]]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fst.ParallelSaver(fill=fail).save(tensors(), str(tmp_path / "m"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("a", "I16", [2], 4), ("a", "I16", [2], 4)], "given twice"),
        ([("a", "AUTO", [2], 4)], "AUTO"),
        ([("a", "I16", [2], 5)], "do not make 5 bytes"),
        ([("a", "I16", [-2], -4)], "do not make"),
        ([("a", "F4", [4], 1)], "do not make"),
    ],
)
def test_entries_that_no_file_can_hold_are_refused_before_anything_is_written(
    entries: list[Any], message: str, tmp_path: Path
) -> None:
    seen: list[Any] = []
    made = [
        WriteEntry(name, fst.DType(dtype), shape, nbytes, source=0) for name, dtype, shape, nbytes in entries
    ]
    with pytest.raises(ValueError, match=message):
        fst.ParallelSaver(fill=encoder(seen)).save_entries(made, str(tmp_path / "m"))
    assert not seen
    assert not list(tmp_path.iterdir())


def test_entries_of_tensors_are_saved_with_their_own_type_and_shape(tmp_path: Path) -> None:
    entry = plain_entry("a", torch.arange(6, dtype=torch.int32))
    entry.dtype, entry.shape = fst.DType.U8, [4, 6]
    paths = fst.ParallelSaver(num_shards=1).save_entries([entry], str(tmp_path / "m"))
    loaded = hoistway.load_file(paths)["a"]
    assert loaded.dtype is torch.uint8
    assert loaded.shape == (4, 6)
    assert loaded.reshape(-1).view(torch.int32).tolist() == list(range(6))


def test_entries_are_saved_in_one_call_or_by_a_plan(tmp_path: Path) -> None:
    entries = [plain_entry(name, tensor) for name, tensor in tensors().items()]
    by_call = fst.saver.save_sharded(entries, str(tmp_path / "call"), num_shards=2, metadata={"a": "b"})
    plans = fst.saver.plan_shards(
        entries,
        fst.saver.shard_paths(str(tmp_path / "plan"), 2),
        metadata={"a": "b"},
        shard_metadata=lambda entries: {"count": str(len(entries))},
        header_align=64,
    )
    assert not list(tmp_path.glob("plan*"))
    by_plan = fst.saver.write_shards(plans, tensor_fill())
    assert by_plan == [plan.path for plan in plans]
    for paths in (by_call, by_plan):
        loaded = hoistway.load_file(paths, framework="raw")
        assert {name: tensor.tobytes() for name, tensor in loaded.items()} == {
            name: bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
            if tensor.numel() and tensor.dim()
            else tensor.numpy().tobytes()
            for name, tensor in tensors().items()
        }
    for plan in plans:
        file = Path(plan.path).read_bytes()
        assert len(file) == plan.total_bytes
        assert file.startswith(plan.header)
        assert len(plan.header) % 64 == 0
        saved = hoistway.load_file(plan.path, framework="raw")
        assert {name: file[begin:end] for name, (begin, end) in plan.offsets.items()} == {
            name: tensor.tobytes() for name, tensor in saved.items()
        }
    with hoistway.open(by_plan[1]) as checkpoint:
        texts = checkpoint.metadata()
        assert texts["a"] == "b"
        assert texts["count"] == str(len(checkpoint))
    assert fst.saver.write_shards([], tensor_fill()) == []


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (WriteEntry("w", fst.DType.F4, [2, 3], 3), "even last dimension"),
        (WriteEntry("w", fst.DType.F4, [], 0), "even last dimension"),
        (WriteEntry("__metadata__", fst.DType.F32, [1], 4), "keep that name"),
    ],
)
def test_entries_that_files_cannot_hold_are_refused(tmp_path: Path, entry: WriteEntry, told: str) -> None:
    saver = pytest.importorskip("fastsafetensors.saver")
    types = pytest.importorskip("fastsafetensors.st_types")
    theirs = saver.WriteEntry(entry.name, types.DType(entry.dtype.value), entry.shape, entry.nbytes)
    for fill in (None, lambda work: None):
        with pytest.raises(ValueError, match=told):
            fst.saver.save_sharded([entry], str(tmp_path / "m"), fill=fill)
    with pytest.raises(ValueError, match=r"F4|reserved"):
        saver.save_sharded([theirs], str(tmp_path / "m"))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("header_align", [24, 4 << 20])
def test_headers_are_padded_to_any_multiple_of_eight(tmp_path: Path, header_align: int) -> None:
    saver = fst.ParallelSaver(num_shards=2)
    for path in saver.save(tensors(), str(tmp_path / "m"), header_align=header_align):
        assert fst.SafeTensorsMetadata.from_file(path).header_length % header_align == 0
    assert hoistway.load_file(str(tmp_path / "m-*.safetensors")).keys() == tensors().keys()


def test_what_is_asked_for_is_named_in_its_own_words(tmp_path: Path) -> None:
    base = str(tmp_path / "m")
    with pytest.raises(ValueError, match="'w' cannot be saved: it has no source"):
        fst.saver.save_sharded([WriteEntry("w", fst.DType.F32, [1], 4)], base)
    for alignment in (-8, 0, 4, 12, 1 << 30):
        with pytest.raises(
            ValueError, match=f"header_align cannot be {alignment}: it must be a multiple of 8"
        ):
            fst.saver.save_sharded([], base, header_align=alignment)
    with pytest.raises(ValueError, match="metadata cannot have 'a'"):
        fst.saver.save_sharded([], base, metadata={"a": 1})
    with pytest.raises(ValueError, match="paths cannot be"):
        fst.saver.plan_shards([], [base, os.path.join(tmp_path, ".", "m")])
    with pytest.raises(ValueError, match=r"hoistway\.save_sharded"):
        fst.saver.plan_shards([], ["s3://models/a.safetensors"])
    assert not os.listdir(tmp_path)
