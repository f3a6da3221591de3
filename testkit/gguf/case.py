"""A case of the corpus, and the files that most cases are variants of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from write import File, Tensor

Listed = tuple[str, str, tuple[int, ...], int, int]
"""Name, type, shape, and the first byte and the length of a tensor in its file."""

ARCHITECTURE = ("general.architecture", "string", "llama")
PLAIN = File([ARCHITECTURE], [Tensor("a", [2, 8], data=bytes(range(64)))])
PAIR = File([ARCHITECTURE], [Tensor("a", [8]), Tensor("b", [8])])


@dataclass(frozen=True)
class Case:
    """Files, and what becomes of them."""

    name: str
    files: Mapping[str, bytes]
    open: str
    """The file to open."""
    error: str | None
    """The error that it gives strictly; none if it is good."""
    lenient: str | None
    """The error that it gives leniently."""
    tensors: tuple[Listed, ...] | None
    """What a good one holds."""
    offset: int = 0
    """Where the GGUF begins in the file."""


def case(
    name: str, file: File | bytes, error: str | None = None, *, lenient: str | Literal["same"] | None = "same"
) -> Case:
    """A case of one file."""
    lenient = error if lenient == "same" else lenient
    data = file.to_bytes() if isinstance(file, File) else file
    is_good = isinstance(file, File) and lenient is None
    tensors = tuple(listed(file)) if is_good and isinstance(file, File) else None
    return Case(name, {"case.gguf": data}, "case.gguf", error, lenient, tensors)


def listed(file: File, start: int = 0) -> Iterator[Listed]:
    """What a file holds: the tensors in the order of its header."""
    start += len(file.head())
    for tensor, offset in zip(file.tensors, file.offsets(), strict=True):
        assert isinstance(tensor.name, str)
        kind = f"GGML_{tensor.type}" if isinstance(tensor.type, int) else tensor.type
        yield tensor.name, kind, tuple(tensor.shape), start + offset, tensor.size
