"""Cases about files that are a part of something: embedded ones and split models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from case import ARCHITECTURE, PAIR, PLAIN, Case, listed
from write import File, Tensor


def set_cases() -> Iterator[Case]:
    """All of them."""
    for make in (_embedded, _splits):
        yield from make()


def _embedded() -> Iterator[Case]:
    def embedded(name: str, data: bytes, offset: int, error: str | None = None) -> Case:
        tensors = None if error else tuple(listed(PAIR, offset))
        return Case(name, {"case.gguf": data}, "case.gguf", error, error, tensors, offset)

    whole = PAIR.to_bytes()
    for before in (64, 7, 4096):
        yield embedded(f"embedded at byte {before}", b"x" * before + whole, before)
    yield embedded("an offset at which no GGUF begins", whole, 8, "NoMagic")
    for offset in (2**20, 2**63, 2**64 - 1):
        yield embedded(f"an offset of {offset} past the file", whole, offset, "NoMagic")
    yield embedded("embedded, and without its last byte", b"x" * 64 + whole[:-1], 64, "Truncated")


def _splits() -> Iterator[Case]:
    def shard(
        number: object,
        count: object,
        tensors: list[str],
        total: object = 4,
        kinds: tuple[str, str, str] = ("u16", "u16", "i32"),
    ) -> File:
        names = ("split.no", "split.count", "split.tensors.count")
        keys = zip(names, kinds, (number, count, total), strict=True)
        metadata = [(key, kind, value) for key, kind, value in keys if value is not None]
        if number == 0:
            metadata.insert(0, ARCHITECTURE)
        return File(metadata, [Tensor(name, [8]) for name in tensors])

    first, second = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
    good = {first: shard(0, 2, ["a", "b"]), second: shard(1, 2, ["c", "d"])}

    def split(
        name: str, files: Mapping[str, File | bytes], error: str | None = None, opened: str = first
    ) -> Case:
        data = {name: file.to_bytes() if isinstance(file, File) else file for name, file in files.items()}
        held = [tensor for file in files.values() if isinstance(file, File) for tensor in listed(file)]
        return Case(name, data, opened, error, error, None if error else tuple(held))

    yield split("a split model", good)
    yield split("a split model, opened by its second file", good, opened=second)
    yield split("a split model whose first file holds keys alone", {**good, first: shard(0, 2, [], 2)})
    yield split(
        "a split model of one file",
        {"m-00001-of-00001.gguf": shard(0, 1, ["a"], 1)},
        opened="m-00001-of-00001.gguf",
    )
    yield split("a file named as if split", {"m-00001-of-00001.gguf": PLAIN}, opened="m-00001-of-00001.gguf")
    yield split("a file of a split model is missing", {first: good[first]}, "NotFound")
    yield split(
        "the first file of a split model is missing", {second: good[second]}, "NotFound", opened=second
    )
    yield split(
        "a split model of 65535 files that are not there",
        {"m-00001-of-65535.gguf": shard(0, 65535, ["a"])},
        "NotFound",
        opened="m-00001-of-65535.gguf",
    )
    yield split(
        "a split model in another's name", {"other.gguf": good[first]}, "SplitName", opened="other.gguf"
    )
    yield split(
        "two files of a split model with the same number", {**good, second: shard(0, 2, ["c", "d"])}, "Split"
    )
    yield split(
        "a split model whose files are swapped",
        {first: shard(1, 2, ["c", "d"]), second: good[first]},
        "SplitName",
    )
    yield split("files that differ in how many there are", {**good, second: shard(1, 3, ["c", "d"])}, "Split")
    yield split(
        "fewer files than the name says",
        {first: shard(0, 1, ["a", "b"]), second: good[second]},
        "SplitTensors",
    )
    yield split(
        "a split model of no files", {first: shard(0, 0, ["a", "b"]), second: good[second]}, "SplitTensors"
    )
    yield split(
        "a file of a split model without its number", {**good, second: shard(None, 2, ["c", "d"])}, "Split"
    )
    yield split(
        "a file of a split model without any such key",
        {**good, second: shard(None, None, ["c", "d"], None)},
        "Split",
    )
    yield split("a tensor fewer than a split model has", {**good, second: shard(1, 2, ["c"])}, "SplitTensors")
    yield split(
        "a tensor more than a split model has", {**good, second: shard(1, 2, ["c", "d", "e"])}, "SplitTensors"
    )
    yield split(
        "a negative number of tensors",
        {first: shard(0, 2, ["a", "b"], -1), second: shard(1, 2, ["c"], -1)},
        "Split",
    )
    yield split("a tensor in two files", {**good, second: shard(1, 2, ["b", "c"])}, "DuplicateTensor")
    cut = good[second].to_bytes()
    yield split("a second file that is cut in its data", {**good, second: cut[:-1]}, "Truncated")
    yield split("a second file that is cut in its header", {**good, second: cut[:40]}, "PastEnd")
    yield split("a second file that is empty", {**good, second: b""}, "NoMagic")
    yield split(
        "a second file of version 1", {**good, second: replace(shard(1, 2, ["c", "d"]), version=1)}, "Version"
    )
    wide = ("u32", "u32", "u64")
    yield split(
        "numbers of another kind",
        {first: shard(0, 2, ["a", "b"], kinds=wide), second: shard(1, 2, ["c", "d"], kinds=wide)},
    )
    yield split(
        "a number of files that is text, in the first",
        {**good, first: shard(0, "2", ["a", "b"], kinds=("u16", "string", "i32"))},
        "Split",
    )
    yield split(
        "a number of files that is a long text",
        {**good, second: shard(1, "2" * 100_000, ["c", "d"], kinds=("u16", "string", "i32"))},
        "Split",
    )
    yield split(
        "a number of files that is text",
        {**good, second: shard(1, "2", ["c", "d"], kinds=("u16", "string", "i32"))},
        "Split",
    )
