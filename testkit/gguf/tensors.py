"""Cases about tensors: good files of all kinds, names, shapes, types and places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from case import ARCHITECTURE, PAIR, PLAIN, Case, case
from write import REMOVED_TYPES, TYPES, Array, File, Lie, Tensor


def tensor_cases() -> Iterator[Case]:
    """All of them."""
    for make in (_good, _names, _shapes, _types, _places):
        yield from make()


def _good() -> Iterator[Case]:
    yield case("one tensor", PLAIN)
    yield case("nothing at all", File())
    yield case("keys without tensors", File([ARCHITECTURE]))
    yield case("keys without tensors, and without padding", File([ARCHITECTURE], alignment=1))
    yield case("a tensor without keys", replace(PLAIN, metadata=()))
    yield case("version 2", replace(PLAIN, version=2))
    scalars = [
        ("u8", 255),
        ("i8", -128),
        ("u16", 65535),
        ("i16", -32768),
        ("u32", 1),
        ("i32", -1),
        ("f32", 0.5),
        ("bool", 1),
        ("string", "ü"),
        ("u64", 2**64 - 1),
        ("i64", -(2**63)),
        ("f64", 1e300),
    ]
    arrays: list[tuple[str, Any]] = [(kind, Array(kind, [value, value])) for kind, value in scalars]
    empty: list[tuple[str, Any]] = [(kind, Array(kind, [])) for kind, _ in scalars]
    yield case("a value of every kind", File([(kind, kind, value) for kind, value in scalars]))
    yield case("an array of every kind", File([(kind, "array", value) for kind, value in arrays]))
    yield case("an empty array of every kind", File([(kind, "array", value) for kind, value in empty]))
    yield case("an empty string", File([("a", "string", "")]))
    yield case(
        "infinite and undefined numbers", File([("a", "f32", float("inf")), ("b", "f64", float("nan"))])
    )
    known = [name for name in TYPES if name not in ("Q8_1", "Q2_0")]
    tensors = [Tensor(name, [3, 2 * TYPES[name].elements], name) for name in known]
    yield case("every type", File([], tensors))
    yield case("Q8_1", File([], [Tensor("a", [64, 32], "Q8_1")]))
    yield case("Q2_0", File([], [Tensor("a", [64], "Q2_0")]))
    tokens = Array("string", ["<s>", "", "é"])
    keys = [ARCHITECTURE, ("general.alignment", "u32", 64), ("llama.rope.freq_base", "f32", 1e4)]
    keys += [("tokenizer.ggml.tokens", "array", tokens), ("flags", "array", Array("bool", [0, 1]))]
    quantised = [Tensor("q", [2, 256], "Q4_K"), Tensor("f", [3]), Tensor("h", [4, 32], "Q8_0")]
    yield case("keys, arrays and tensors", File(keys, quantised, alignment=64))
    yield case("four dimensions", File([], [Tensor("a", [2, 3, 4, 5], "I16")]))
    yield case("trailing bytes", replace(PLAIN, tail=b"and more"))
    yield case("a file that ends with the last tensor, not with its padding", replace(PAIR, data=bytes(64)))
    big = replace(PLAIN, order=">", data=bytes(64))
    yield case("big-endian", big)
    yield case("big-endian, keys alone", replace(big, tensors=()))
    yield case(
        "big-endian, values of every kind", File([(kind, kind, value) for kind, value in scalars], order=">")
    )
    yield case(
        "big-endian, arrays of every kind",
        File([(kind, "array", value) for kind, value in arrays], order=">"),
    )


def _names() -> Iterator[Case]:
    def named(*names: Any) -> File:
        return File([ARCHITECTURE], [Tensor(name, [8]) for name in names])

    yield case("a tensor without a name", named(""))
    yield case("a name of 63 bytes", named("n" * 63))
    yield case("a name of 64 bytes", named("n" * 64))
    yield case("a name of 255 bytes", named("n" * 255))
    yield case("a name of 256 bytes", named("n" * 256), "LongName", lenient=None)
    yield case("a name of 1000 bytes", named("n" * 1000), "LongName", lenient=None)
    yield case("a name of 65536 bytes", named("n" * 65536), "TooMany")
    for length in (2**20, 2**63, 2**64 - 1):
        yield case(f"a name of {length} bytes that are not there", named(Lie("a", length)), "TooMany")
    yield case("a name with unusual characters", named("ü/..\n\t*?["))
    yield case("a name that is no text", named(b"\xff\xfe"), "NotUtf8")
    yield case("a tensor twice", named("a", "b", "a"), "DuplicateTensor")
    yield case("names that differ in a blank", named("a", "a "))
    yield case("a tensor and a key of the same name", named("general.architecture"))


def _shapes() -> Iterator[Case]:
    def shaped(shape: list[int], kind: str = "F32", **options: Any) -> File:
        return File([ARCHITECTURE], [Tensor("a", shape, kind, data=bytes(32), **options)])

    yield case("no dimensions", File([], [Tensor("a", []), Tensor("b", [8])]))
    yield case("a dimension of 0", File([], [Tensor("a", [4, 0]), Tensor("b", [8])]))
    yield case("nothing but a dimension of 0", File([], [Tensor("a", [0], "Q8_0")]))
    yield case("all dimensions 0", File([], [Tensor("a", [0, 0, 0, 0], "I8")]))
    yield case("many tensors of no bytes", File([], [Tensor(f"{i}", [0, 8]) for i in range(9)]))
    for count in (5, 8):
        yield case(
            f"{count} dimensions",
            File([], [Tensor("a", [1] * (count - 1) + [8])]),
            "Dimensions",
            lenient=None,
        )
    yield case("9 dimensions", File([], [Tensor("a", [1] * 8 + [8])]), "Dimensions")
    for count in (2**16, 2**31, 2**32 - 1):
        yield case(f"{count} dimensions that are not there", shaped([8], dimensions=count), "Dimensions")
    top = 2**63 - 1
    for name, shape, kind in (
        ("a dimension of 2^63", [2**63], "I8"),
        ("a dimension of 2^64 - 1", [2**64 - 1], "I8"),
        ("2^63 - 1 times 2 elements", [2, top], "I8"),
        ("2^32 times 2^32 elements", [2**32, 2**32], "I8"),
        ("2^16 elements in each of four dimensions", [2**16] * 4, "I8"),
        ("2^22 elements in each of three dimensions, and 2", [2, 2**21, 2**21, 2**21], "I8"),
        ("2^61 elements of 8 bytes", [2**61], "F64"),
        ("2^62 elements of 4 bytes", [2**31, 2**31], "F32"),
    ):
        yield case(name, shaped(shape, kind), "Overflow")
    yield case("2^63 - 32 elements in blocks", shaped([2**58 - 1, 32], "Q8_0"), "Overflow")
    yield case("2^60 elements of a byte", shaped([2**60], "I8"), "Truncated")
    yield case("2^63 - 1 elements of a byte", shaped([top], "I8"), "Overflow")
    yield case("a dimension of 2^63 beside one of 0", shaped([0, 2**63], "I8"), "Overflow")
    huge = File([ARCHITECTURE], [Tensor("a", [0, 2**40, 2**40], "I8")])
    yield case("dimensions whose product overflows before one of 0", huge)
    for kind, size in (
        ("Q8_0", 33),
        ("Q8_0", 31),
        ("Q4_K", 32),
        ("Q6_K", 255),
        ("NVFP4", 32),
        ("Q1_0", 64),
        ("IQ2_XXS", 1),
    ):
        yield case(f"{kind} in rows of {size}", shaped([4, size], kind), "PartialBlock")
    yield case("Q8_0 without dimensions", shaped([], "Q8_0"), "PartialBlock")


def _types() -> Iterator[Case]:
    for number in REMOVED_TYPES:
        yield case(
            f"removed type {number}", File([], [Tensor("a", [32], number, data=bytes(32))]), "RemovedType"
        )
    for number in (43, 97, 2**31, 2**32 - 1):
        yield case(
            f"unknown type {number}", File([], [Tensor("a", [32], number, data=bytes(32)), Tensor("b", [8])])
        )


def _places() -> Iterator[Case]:
    def placed(first: int, second: int, data: int = 256, sizes: tuple[int, int] = (8, 8)) -> File:
        tensors = [Tensor("a", [sizes[0]], offset=first), Tensor("b", [sizes[1]], offset=second)]
        return File([ARCHITECTURE], tensors, data=bytes(data))

    yield case("a gap between tensors", placed(0, 128))
    yield case("a gap before the first tensor", placed(64, 96))
    yield case("tensors out of order", placed(32, 0))
    yield case("unaligned offsets", placed(0, 36), "Misaligned", lenient=None)
    yield case("an odd offset", placed(0, 33), "Misaligned", lenient=None)
    for name, second, sizes in (
        ("tensors in the same place", 0, (8, 8)),
        ("tensors that overlap", 32, (16, 8)),
        ("a tensor inside another", 32, (64, 8)),
        ("tensors that overlap, the second larger", 0, (8, 64)),
    ):
        yield case(name, placed(0, second, sizes=sizes), "Overlap")
    yield case("an unaligned offset inside another tensor", placed(0, 16), "Misaligned", lenient="Overlap")
    for offset in (2**63, 2**64 - 32):
        yield case(
            f"an offset of {offset}",
            placed(0, offset, sizes=(8, 4)),
            "Overflow" if offset > 2**63 else "Truncated",
        )
    yield case("an offset of 2^62", placed(0, 2**62), "Truncated")
    yield case("a tensor of one byte past the end", replace(placed(0, 32), data=bytes(63)), "Truncated")
    yield case("a tensor wholly past the end", placed(0, 256), "Truncated")
    yield case("no data at all", replace(placed(0, 32), data=b""), "Truncated")
    yield case("a tensor of no bytes at the end", placed(0, 32, data=32, sizes=(8, 0)))
    yield case("a tensor of no bytes past the end", placed(0, 64, data=32, sizes=(8, 0)))
    yield case("a tensor of no bytes inside another", placed(0, 32, sizes=(64, 0)))
