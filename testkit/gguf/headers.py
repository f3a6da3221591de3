"""Cases about headers: their start, where they are cut, keys, values, arrays and alignments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from case import ARCHITECTURE, PAIR, PLAIN, Case, case
from write import Array, File, Lie, Raw, Tensor


def header_cases() -> Iterator[Case]:
    """All of them."""
    for make in (_starts, _cut, _keys, _values, _arrays, _alignments):
        yield from make()


def _starts() -> Iterator[Case]:
    yield case("empty file", b"", "NoMagic")
    yield case("magic in lower case", replace(PLAIN, magic=b"gguf"), "NoMagic")
    yield case("magic backwards", replace(PLAIN, magic=b"FUGG"), "NoMagic")
    yield case("magic of ggml's first format", replace(PLAIN, magic=b"lmgg"), "NoMagic")
    for version in (0, 1, 4, 2**32 - 1):
        yield case(f"version {version}", replace(PLAIN, version=version), "Version")
    yield case("version 3 in the upper half", replace(PLAIN, version=3 << 16), "Version")
    yield case("version 1, big-endian", replace(PLAIN, version=1, order=">"), "Version")
    yield case("version 4, big-endian", replace(PLAIN, version=4, order=">"), "Version")
    for count in (2**20 + 1, 2**32, 2**60, 2**63, 2**64 - 1):
        yield case(f"{count} tensors", File([ARCHITECTURE], tensor_count=count), "TooMany")
        yield case(f"{count} keys", File([ARCHITECTURE], metadata_count=count), "TooMany")
    yield case("1000000 tensors in a small file", File([ARCHITECTURE], tensor_count=1_000_000), "PastEnd")
    yield case("1000000 keys in a small file", File([ARCHITECTURE], metadata_count=1_000_000), "PastEnd")
    yield case("a tensor more than there are", File([ARCHITECTURE], tensor_count=1), "Truncated")
    # The padding reads like a key without a name.
    more = File([ARCHITECTURE], metadata_count=2).to_bytes()
    yield case("a key more than there are", more, "EmptyKey", lenient=None)
    # The key reads like a tensor of 8 dimensions.
    fewer = replace(PLAIN, metadata_count=0).to_bytes()
    yield case("a key fewer than there are", fewer, "Dimensions", lenient=None)


def _cut() -> Iterator[Case]:
    array = ("b", "array", Array("string", ["one", "two"]))
    whole = File([ARCHITECTURE, ("n", "u32", 7), array], PAIR.tensors)
    data = whole.to_bytes()
    head = whole.head()
    key, number, list_at = (data.index(name) for name in (b"general", b"n\x04", b"b\x09"))
    tensor = data.index(b"a\x01\0\0\0")
    cuts = {
        "magic": (3, "NoMagic"),
        "version": (7, "PastEnd"),
        "number of tensors": (15, "PastEnd"),
        "number of keys": (23, "PastEnd"),
        "length of a key": (key - 1, "PastEnd"),
        "key": (key + 3, "PastEnd"),
        "kind of a value": (key + 22, "PastEnd"),
        "length of a string": (key + 30, "PastEnd"),
        "string": (key + 34, "PastEnd"),
        "number": (number + 7, "PastEnd"),
        "kind of an array": (list_at + 7, "PastEnd"),
        "length of an array": (list_at + 12, "PastEnd"),
        "array": (list_at + 30, "PastEnd"),
        "name of a tensor": (tensor, "PastEnd"),
        "number of dimensions": (tensor + 3, "PastEnd"),
        "dimensions": (tensor + 10, "PastEnd"),
        "type": (tensor + 15, "PastEnd"),
        "offset": (tensor + 20, "PastEnd"),
    }
    for place, (end, error) in cuts.items():
        yield case(f"cut in the {place}", data[:end], error)
    unpadded = len(head.rstrip(b"\0"))
    for place, end in (
        ("padding of the header", unpadded + 9),
        ("first tensor", len(head) + 31),
        ("last tensor", len(head) + 32 + 31),
    ):
        assert end < len(data)
        yield case(f"cut in the {place}", data[:end], "Truncated")


def _keys() -> Iterator[Case]:
    def key(name: Any) -> File:
        return File([(name, "u8", 1), ("z", "string", "last")])

    yield case("an empty key", key(""), "EmptyKey", lenient=None)
    yield case("a key of 65535 bytes", key("k" * 65535))
    yield case("a key of 65536 bytes", key("k" * 65536), "TooMany")
    yield case("a key with unusual characters", key("ключ с \n\t\"'"))
    yield case("a key with a NUL", key("a\0b"))
    for length in (2**20, 2**31, 2**63, 2**64 - 1):
        yield case(f"a key of {length} bytes that are not there", key(Lie("key", length)), "TooMany")
    yield case(
        "a key that is one byte longer than the file",
        File([(Lie(b"k", 14), "u8", 1)], alignment=1),
        "PastEnd",
    )
    for what, name in (
        ("a byte that is no text", b"k\xff"),
        ("a character that is cut", b"k\xc3"),
        ("an overlong character", b"k\xc0\xaf"),
        ("half a pair of surrogates", b"k\xed\xa0\x80"),
    ):
        yield case(f"a key with {what}", key(name), "NotUtf8")
    yield case("a key twice", File([("a", "u8", 1), ("b", "u8", 1), ("a", "u8", 1)]), "DuplicateKey")
    yield case("a key twice, of two kinds", File([("a", "u8", 1), ("a", "string", "x")]), "DuplicateKey")
    yield case("the alignment twice", File([("general.alignment", "u32", 32)] * 2), "DuplicateKey")


def _values() -> Iterator[Case]:
    for kind in (13, 255, 2**31, 2**32 - 1):
        yield case(f"a value of kind {kind}", File([("a", kind, Raw(bytes(32)))]), "ValueType")
    for value in (2, 255):
        yield case(f"the boolean {value}", File([("a", "bool", value)]), "Boolean", lenient=None)
    for length in (2**31, 2**63, 2**64 - 1):
        yield case(f"a string of {length} bytes", File([("a", "string", Lie("text", length))]), "TooMany")
    yield case(
        "a string of 1000000 bytes that are not there", File([("a", "string", Lie("text", 10**6))]), "PastEnd"
    )
    yield case(
        "a string one byte longer than the file",
        File([("a", "string", Lie("text", 5))], alignment=1),
        "PastEnd",
    )
    yield case("a string of 16 MiB", File([("a", "string", "x" * (1 << 24))]))
    yield case(
        "a string of a byte more than 16 MiB", File([("a", "string", "x" * ((1 << 24) + 1))]), "TooMany"
    )
    yield case("a string that is no text", File([("a", "string", b"\xff\xfe")]), "NotUtf8")


def _arrays() -> Iterator[Case]:
    def array(kind: Any, values: Any, count: int | None = None) -> File:
        return File([("a", "array", Array(kind, values, count)), ("z", "string", "last")])

    for kind, count in (
        ("u8", 2**60),
        ("u8", 2**64 - 1),
        ("u16", 2**63),
        ("u32", 2**62),
        ("u64", 2**61),
        ("f64", 2**61 + 1),
        ("string", 2**60),
        ("string", 2**61),
        ("string", 2**64 - 1),
        ("bool", 2**63),
        ("u8", 2**26 + 1),
    ):
        yield case(f"an array of {count} times {kind}", array(kind, [], count), "TooMany")
    yield case("an array of a million numbers that are not there", array("u32", [1], 10**6), "PastEnd")
    yield case("an array of a million strings that are not there", array("string", ["x"], 10**6), "PastEnd")
    yield case(
        "an array one element longer than the file",
        File([("a", "array", Array("u8", [1], 2))], alignment=1),
        "PastEnd",
    )
    for unknown in (13, 2**32 - 1):
        yield case(f"an array of kind {unknown}", array(unknown, [Raw(bytes(8))]), "ValueType")
        yield case(f"an empty array of kind {unknown}", array(unknown, []), "ValueType")
    yield case("a string of 2^63 bytes in an array", array("string", ["x", Lie("y", 2**63)]), "TooMany")
    yield case(
        "a string in an array one byte longer than the file",
        File([("a", "array", Array("string", ["x", Lie("y", 2)]))], alignment=1),
        "PastEnd",
    )
    yield case("the boolean 2 in an array", array("bool", [1, 2]), "Boolean", lenient=None)
    yield case("a string that is no text in an array", array("string", ["x", b"\xff"]))
    for depth in (2, 4, 5, 64, 10_000):
        values: Any = Array("u8", [1])
        for _ in range(min(depth, 5) - 1):
            values = Array("array", [values])
        if depth > 5:
            values = Raw(
                bytes.fromhex("09000000 0100000000000000") * (depth - 1)
                + bytes.fromhex("00000000 0100000000000000 01")
            )
        yield case(
            f"arrays in arrays, {depth} deep",
            File([("a", "array", values), ("z", "string", "last")]),
            "Nested",
            lenient=None if depth <= 4 else "Nested",
        )
    yield case("an empty array of arrays", array("array", []))
    yield case("2^60 arrays in an array", array("array", [], 2**60), "TooMany")
    yield case(
        "a million arrays in an array that are not there",
        array("array", [], 10**6),
        "TooMany",
    )


def _alignments() -> Iterator[Case]:
    def aligned(value: object, kind: str = "u32", written: int = 32) -> File:
        return File([("general.alignment", kind, value)], PAIR.tensors, alignment=written)

    for value in (8, 16, 64, 4096):
        yield case(f"alignment {value}", aligned(value, written=value))
    for value in (1, 2, 4):
        yield case(f"alignment {value}", aligned(value, written=value), "Alignment", lenient=None)
    for value in (0, 3, 12, 24, 48, 2**32 - 1):
        yield case(f"alignment {value}", aligned(value), "Alignment")
    far = replace(aligned(2**31), tensors=PAIR.tensors[:1])
    yield case("alignment 2147483648 with a tensor", far, "Truncated")
    yield case("alignment 2147483648 without tensors", File([("general.alignment", "u32", 2**31)]))
    for kind, other in (("i32", 32), ("u64", 32), ("u16", 32), ("f32", 32.0), ("string", "32"), ("bool", 1)):
        yield case(f"alignment of kind {kind}", aligned(other, kind), "AlignmentType")
    yield case("alignment of kind array", aligned(Array("u32", [32]), "array"), "AlignmentType")
    yield case(
        "alignment 64 with tensors at 32",
        replace(aligned(64), alignment=64, tensors=(Tensor("a", [8]), Tensor("b", [8], offset=32))),
        "Misaligned",
        lenient=None,
    )
