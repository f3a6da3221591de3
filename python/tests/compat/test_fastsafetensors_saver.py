"""Saving as many files as one asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import windlass
import windlass.compat.fastsafetensors as fst
from conftest import same_bytes


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
    loaded = windlass.load_file(paths)
    assert set(loaded) == set(tensors())
    for name, tensor in tensors().items():
        if name == "f4":
            assert loaded[name].view(torch.uint8).eq(0).all()
        else:
            assert same_bytes(loaded[name], tensor.contiguous()), name
    largest = [sum(tensor.nbytes for tensor in windlass.load_file(path).values()) for path in paths]
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


@pytest.mark.parametrize(
    "options", [{"num_shards": 0}, {"num_threads": 0}, {"fill": print}, {"framework": "paddle"}]
)
def test_what_cannot_be_done_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        fst.ParallelSaver(**options)


def test_space_that_is_not_there_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="left over"):
        fst.ParallelSaver(min_free_bytes=1 << 62).save(tensors(), str(tmp_path / "m"))
    assert not list(tmp_path.iterdir())
