"""Where other parsers differ from hoistway, and why."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple


class Difference(NamedTuple):
    """What another parser makes of some cases, by patterns of their names."""

    parser: Literal["ggml", "gguf"]
    verdict: Literal["accept", "reject", "crash", "hang"]
    why: str
    cases: tuple[str, ...]


# Of ggml 0.13.1, which pywhispercpp 1.5.1 brings, and of gguf 0.19.0.
DIFFERENCES = (
    Difference(
        "ggml",
        "accept",
        "it looks at the file's end only when it reads the data",
        (
            "cut in the first tensor",
            "cut in the last tensor",
            "a tensor more than there are",
            "2^60 elements of a byte",
            "a tensor of one byte past the end",
            "no data at all",
        ),
    ),
    Difference(
        "ggml",
        "reject",
        "it takes tensors in the order of their data and without gaps only; other writers leave both",
        (
            "a gap *",
            "tensors out of order",
            "a tensor of no bytes inside another",
            "a tensor of no bytes past the end",
        ),
    ),
    Difference(
        "ggml",
        "reject",
        "it reads files of its own byte order only; of others, we read all but the elements",
        ("big-endian*",),
    ),
    Difference(
        "ggml",
        "reject",
        "it is built with room for names of 63 bytes, and with more in stable-diffusion.cpp",
        ("a name of 64 bytes", "a name of 255 bytes"),
    ),
    Difference(
        "ggml",
        "reject",
        "this version does not know the type yet",
        ("Q2_0",),
    ),
    Difference(
        "ggml",
        "reject",
        "we list tensors of types to come and of other engines, so that they can be left out",
        ("unknown type *",),
    ),
    Difference(
        "ggml",
        "accept",
        "a key or a name that is no text cannot be looked up, printed or compared",
        ("a key with a byte *", "a key with a character *", "a key with an overlong *", "a key with half *"),
    ),
    Difference(
        "ggml",
        "accept",
        "as keys that are no text",
        ("a name that is no text", "a string that is no text"),
    ),
    Difference(
        "ggml",
        "accept",
        "ours is the lowest limit: no model comes near it",
        ("a key of 65536 bytes", "a string of a byte more than 16 MiB"),
    ),
    Difference(
        "ggml",
        "accept",
        "it takes anything but 0 for true, as we do when lenient",
        ("the boolean *",),
    ),
    Difference(
        "ggml",
        "accept",
        "the format asks for a multiple of 8; lenient, we take any power of two",
        ("alignment 1", "alignment 2", "alignment 4"),
    ),
    Difference(
        "ggml",
        "accept",
        "it does not tell an array of one number from that number",
        ("alignment of kind array",),
    ),
    Difference(
        "ggml",
        "crash",
        "this version aborts; later ones refuse it",
        (
            "1048577 keys",
            "4294967296 keys",
            "1000000 keys in a small file",
            "a key more than there are",
            "an empty key",
            "alignment of kind i32",
            "alignment of kind u64",
            "alignment of kind u16",
            "alignment of kind f32",
            "alignment of kind string",
            "alignment of kind bool",
        ),
    ),
    Difference(
        "ggml",
        "crash",
        "this version aborts; later ones take it",
        ("all dimensions 0", "many tensors of no bytes"),
    ),
    Difference(
        "ggml",
        "reject",
        "it has no bytes, so nothing overflows",
        ("dimensions whose product overflows before one of 0",),
    ),
    Difference(
        "ggml",
        "reject",
        "there is no array in it",
        ("an empty array of arrays",),
    ),
    Difference(
        "gguf",
        "accept",
        "it takes what there is where the file says more",
        (
            "a string of 2147483648 bytes",
            "a string of 9223372036854775808 bytes",
            "a string of 18446744073709551615 bytes",
            "a string of 1000000 bytes that are not there",
            "a string one byte longer than the file",
            "an array one element longer than the file",
            "a string in an array one byte longer than the file",
        ),
    ),
    Difference(
        "gguf",
        "hang",
        "it reads what is not there element by element, for minutes and into swap",
        (
            "an array of 1152921504606846976 times u8",
            "an array of 18446744073709551615 times u8",
            "an array of 9223372036854775808 times bool",
            "an array of 67108865 times u8",
            "2^60 arrays in an array",
            "a million arrays in an array that are not there",
        ),
    ),
    Difference(
        "gguf",
        "accept",
        "it reads nested arrays, as we do when lenient and they are at most 4 deep; no model has them",
        (
            "arrays in arrays, 2 deep",
            "arrays in arrays, 4 deep",
            "arrays in arrays, 5 deep",
            "arrays in arrays, 64 deep",
        ),
    ),
    Difference(
        "gguf",
        "accept",
        "it takes kinds that do not exist where no value is of them",
        ("an empty array of kind *",),
    ),
    Difference(
        "gguf",
        "accept",
        "it does not read text before it is asked for",
        ("a string that is no text",),
    ),
    Difference(
        "gguf",
        "accept",
        "ours is the lowest limit: no model comes near it",
        ("a key of 65536 bytes", "a string of a byte more than 16 MiB", "a name of 65536 bytes"),
    ),
    Difference(
        "gguf",
        "accept",
        "it takes anything but 0 for true, as we do when lenient",
        ("the boolean *",),
    ),
    Difference(
        "gguf",
        "accept",
        "the format asks for a multiple of 8; lenient, we take any power of two",
        ("alignment 1", "alignment 2", "alignment 4"),
    ),
    Difference(
        "gguf",
        "accept",
        "nothing has room for it; lenient, we take up to 65535 bytes and 8 dimensions",
        ("a name of 256 bytes", "a name of 1000 bytes", "5 dimensions", "8 dimensions", "9 dimensions"),
    ),
    Difference(
        "gguf",
        "accept",
        "the format asks for aligned offsets; lenient, we take others",
        ("unaligned offsets", "an odd offset", "alignment 64 with tensors at 32"),
    ),
    Difference(
        "gguf",
        "accept",
        "it does not look for bytes that two tensors share: a mistake, or an attack",
        (
            "tensors in the same place",
            "tensors that overlap*",
            "a tensor inside another",
            "an unaligned offset inside another tensor",
        ),
    ),
    Difference(
        "gguf",
        "accept",
        "its sums wrap around",
        ("an offset of 18446744073709551584",),
    ),
    Difference(
        "gguf",
        "reject",
        "it has no bytes, so nothing overflows",
        ("dimensions whose product overflows before one of 0",),
    ),
    Difference(
        "gguf",
        "accept",
        "ggml and we want keys to be called something; lenient, we take others too",
        ("an empty key", "a key more than there are"),
    ),
    Difference(
        "gguf",
        "reject",
        "it takes a block of Q8_1 for 40 bytes; ggml stores 36",
        ("Q8_1",),
    ),
    Difference(
        "gguf",
        "reject",
        "this version does not know the type yet",
        ("Q2_0",),
    ),
    Difference(
        "gguf",
        "reject",
        "we list tensors of types to come and of other engines, so that they can be left out",
        ("unknown type *",),
    ),
)


def differences(names: Iterable[str]) -> dict[str, dict[str, dict[str, str]]]:
    """By case and parser: its verdict, and why ours is another."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    listed = sorted(names)
    for parser, verdict, why, patterns in DIFFERENCES:
        for pattern in patterns:
            matching = [name for name in listed if fnmatchcase(name, pattern)]
            assert matching, f"no case is named {pattern!r}"
            for name in matching:
                assert parser not in found.setdefault(name, {}), f"{parser} is listed twice for {name!r}"
                found[name][parser] = {"verdict": verdict, "why": why}
    return found
