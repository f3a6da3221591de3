"""Writes GGUF files for tests: every number as told, so that every number can be a lie."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class BlockType(NamedTuple):
    """A type of ggml's: its number, and how many elements and bytes a block of it has."""

    number: int
    elements: int
    bytes: int


TYPES = {
    "F32": BlockType(0, 1, 4),
    "F16": BlockType(1, 1, 2),
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q8_0": BlockType(8, 32, 34),
    "Q8_1": BlockType(9, 32, 36),
    "Q2_K": BlockType(10, 256, 84),
    "Q3_K": BlockType(11, 256, 110),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
    "Q8_K": BlockType(15, 256, 292),
    "IQ2_XXS": BlockType(16, 256, 66),
    "IQ2_XS": BlockType(17, 256, 74),
    "IQ3_XXS": BlockType(18, 256, 98),
    "IQ1_S": BlockType(19, 256, 50),
    "IQ4_NL": BlockType(20, 32, 18),
    "IQ3_S": BlockType(21, 256, 110),
    "IQ2_S": BlockType(22, 256, 82),
    "IQ4_XS": BlockType(23, 256, 136),
    "I8": BlockType(24, 1, 1),
    "I16": BlockType(25, 1, 2),
    "I32": BlockType(26, 1, 4),
    "I64": BlockType(27, 1, 8),
    "F64": BlockType(28, 1, 8),
    "IQ1_M": BlockType(29, 256, 56),
    "BF16": BlockType(30, 1, 2),
    "TQ1_0": BlockType(34, 256, 54),
    "TQ2_0": BlockType(35, 256, 66),
    "MXFP4": BlockType(39, 32, 17),
    "NVFP4": BlockType(40, 64, 36),
    "Q1_0": BlockType(41, 128, 18),
    "Q2_0": BlockType(42, 64, 18),
}
REMOVED_TYPES = (4, 5, 31, 32, 33, 36, 37, 38)

# Kinds of metadata values: their numbers, and how one is packed.
KINDS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "B"),
    "string": (8, ""),
    "array": (9, ""),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}

Kind = str | int
Text = str | bytes


class Lie(NamedTuple):
    """A string that claims to be of another length."""

    text: Text
    length: int


@dataclass(frozen=True)
class Array:
    """An array of values of a kind, which may claim another count."""

    kind: Kind
    values: Sequence[object]
    count: int | None = None


@dataclass(frozen=True)
class Raw:
    """A value whose bytes are given."""

    bytes: bytes


@dataclass
class Tensor:
    """A tensor's description, and its data if that is not all zeros."""

    name: Text | Lie
    shape: Sequence[int]
    """Slowest dimension first; files have them the other way round."""
    type: str | int = "F32"
    offset: int | None = None
    """From the start of the data; by default right after the tensor before, on the file's alignment."""
    data: bytes | None = None
    dimensions: int | None = None
    """How many the file says it has."""

    @property
    def size(self) -> int:
        """Bytes of its data; none if its type is no type."""
        if self.data is not None:
            return len(self.data)
        if isinstance(self.type, int):
            return 0
        kind = TYPES[self.type]
        return math.prod(self.shape) // kind.elements * kind.bytes

    @property
    def type_number(self) -> int:
        """The number of its type."""
        return self.type if isinstance(self.type, int) else TYPES[self.type].number


@dataclass
class File:
    """A GGUF file in the making."""

    metadata: Sequence[tuple[Text | Lie, Kind, object]] = ()
    tensors: Sequence[Tensor] = ()
    version: int = 3
    order: str = "<"
    alignment: int = 32
    """What is written is aligned to; what the file says is a matter of its metadata."""
    magic: bytes = b"GGUF"
    tensor_count: int | None = None
    metadata_count: int | None = None
    data: bytes | None = field(default=None, repr=False)
    """The whole of the data, instead of that of the tensors."""
    tail: bytes = b""

    def to_bytes(self) -> bytes:
        """The file."""
        return self.head() + self.body() + self.tail

    def head(self) -> bytes:
        """All before the data, with the padding."""
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        metadata_count = len(self.metadata) if self.metadata_count is None else self.metadata_count
        parts = [self.magic, self._number("I", self.version)]
        parts += [self._number("Q", tensor_count), self._number("Q", metadata_count)]
        parts += [self._pair(*pair) for pair in self.metadata]
        parts += [
            self._description(tensor, offset)
            for tensor, offset in zip(self.tensors, self.offsets(), strict=True)
        ]
        text = b"".join(parts)
        return text + bytes(-len(text) % self.alignment)

    def offsets(self) -> list[int]:
        """Where each tensor begins, from the start of the data."""
        found = []
        end = 0
        for tensor in self.tensors:
            offset = end + -end % self.alignment if tensor.offset is None else tensor.offset
            found.append(offset)
            end = offset + tensor.size
        return found

    def body(self) -> bytes:
        """The data of all tensors; the last one is padded, as all writers do it."""
        if self.data is not None:
            return self.data
        data = bytearray()
        for tensor, offset in zip(self.tensors, self.offsets(), strict=True):
            end = offset + tensor.size
            data.extend(bytes(max(end + -end % self.alignment - len(data), 0)))
            data[offset:end] = tensor.data if tensor.data is not None else bytes(tensor.size)
        return bytes(data)

    def _number(self, code: str, value: object) -> bytes:
        return struct.pack(self.order + code, value)

    def _string(self, text: Text | Lie) -> bytes:
        text, length = text if isinstance(text, Lie) else (text, None)
        encoded = text.encode() if isinstance(text, str) else text
        return self._number("Q", len(encoded) if length is None else length) + encoded

    def _pair(self, key: Text | Lie, kind: Kind, value: object) -> bytes:
        return self._string(key) + self._kind(kind) + self._value(kind, value)

    def _kind(self, kind: Kind) -> bytes:
        return self._number("I", kind if isinstance(kind, int) else KINDS[kind][0])

    def _value(self, kind: Kind, value: object) -> bytes:
        if isinstance(value, Raw):
            return value.bytes
        if isinstance(value, Array):
            count = len(value.values) if value.count is None else value.count
            items = b"".join(self._value(value.kind, item) for item in value.values)
            return self._kind(value.kind) + self._number("Q", count) + items
        if isinstance(value, (str, bytes, Lie)):
            return self._string(value)
        return self._number(KINDS[kind][1] if isinstance(kind, str) else "B", value)

    def _description(self, tensor: Tensor, offset: int) -> bytes:
        dimensions = len(tensor.shape) if tensor.dimensions is None else tensor.dimensions
        parts = [self._string(tensor.name), self._number("I", dimensions)]
        parts += [self._number("Q", size) for size in reversed(tensor.shape)]
        return b"".join([*parts, self._number("I", tensor.type_number), self._number("Q", offset)])
