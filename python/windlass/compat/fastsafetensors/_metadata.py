"""Headers of safetensors files: what tensors there are, and where."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass._words import counted
from windlass.compat.fastsafetensors._dtypes import DType
from windlass.errors import FormatError, SliceError

_LONGEST_HEADER = 100_000_000
# What kernels want addresses to be multiples of.
_POINTER_ALIGNMENT = 16


@dataclass
class TensorFrame:
    """A tensor's type, shape and place, or those of a part of it."""

    dtype: DType
    shape: list[int]
    data_offsets: list[int]
    strides: list[int]
    offsets: list[int]
    sliced: bool

    @classmethod
    def from_buffer(cls, entry: Mapping[str, Any]) -> TensorFrame:
        """The frame of an entry of a header."""
        shape = entry["shape"]
        if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
            raise FormatError(f"shape {shape!r} is no list of sizes")
        strides = [1] * len(shape)
        for dim in range(len(shape) - 1, 0, -1):
            strides[dim - 1] = strides[dim] * shape[dim]
        offsets = list(entry["data_offsets"])
        return cls(DType(entry["dtype"]), shape, offsets, strides, [0] * len(shape), False)

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> TensorFrame:
        """A part. Dimensions that are indexed with a number stay, with size 1."""
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > len(self.shape):
            raise SliceError(f"shape {self.shape} is indexed with {len(items)} dimensions")
        shape, strides, offsets = list(self.shape), list(self.strides), list(self.offsets)
        for dim, item in enumerate(items):
            chosen = self._chosen(dim, item)
            shape[dim] = len(chosen)
            strides[dim] *= chosen.step
            offsets[dim] += chosen.start
        return replace(self, shape=shape, strides=strides, offsets=offsets, sliced=True)

    def _chosen(self, dim: int, item: int | slice) -> range:
        size = self.shape[dim]
        if isinstance(item, slice):
            return range(*item.indices(size))
        if isinstance(item, int):
            if not -size <= item < size:
                raise SliceError(f"index {item} is outside dimension {dim}, which has size {size}")
            return range(item % size, item % size + 1)
        raise SliceError(f"{item!r} cannot index a tensor: use integers and slices")

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.bits // 8


class SafeTensorsMetadata:
    """The header of one file. `tensors` has the frames in the order of their bytes."""

    def __init__(  # noqa: PLR0917  (the parameters are the interface's)
        self,
        string: str,
        header_length: int,
        size_bytes: int,
        framework: Any = None,
        src: str = "",
        keep_orig_dict: bool = False,
    ) -> None:
        self.src = src
        self.framework = framework
        self.header_length = header_length
        self.size_bytes = size_bytes
        self.aligned = header_length % _POINTER_ALIGNMENT == 0
        try:
            entries = json.loads(string)
            self.metadata: Any = entries.pop("__metadata__", "")
            if keep_orig_dict:
                self.ser = entries
            frames = {name: TensorFrame.from_buffer(entry) for name, entry in entries.items()}
            self.tensors: dict[str, TensorFrame] = dict(
                sorted(frames.items(), key=lambda item: item[1].data_offsets)
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(f"{src}: the header is not one of safetensors: {error}", path=src) from error
        self._check()

    def _check(self) -> None:
        end = 0
        for name, frame in self.tensors.items():
            if len(frame.data_offsets) != 2 or frame.data_offsets != [end, end + frame.nbytes]:
                raise FormatError(
                    f"{self.src}: tensor {name!r} should lie at {[end, end + frame.nbytes]}, by its shape and those "
                    f"before it, but lies at {frame.data_offsets}",
                    path=self.src,
                    tensor=name,
                )
            end += frame.nbytes
        if self.header_length + end > self.size_bytes:
            raise FormatError(
                f"{self.src}: header and tensors take {self.header_length + end} bytes, but there are "
                f"{self.size_bytes}",
                path=self.src,
            )

    @classmethod
    def from_buffer(
        cls, buf: int, buffer_len: int, filename: str, framework: Any = None
    ) -> SafeTensorsMetadata:
        """The header of a file in memory at this address."""
        length = _header_length(ctypes.string_at(buf, 8) if buffer_len >= 8 else b"", buffer_len, filename)
        text = ctypes.string_at(buf + 8, length)
        return cls(_decoded(text, filename), length + 8, buffer_len, framework, filename)

    @classmethod
    def from_fd(
        cls, fd: int, filename: str, framework: Any = None, keep_orig_dict: bool = False
    ) -> SafeTensorsMetadata:
        """The header of an open file, which is read from where it stands."""
        size = os.fstat(fd).st_size
        with open(os.dup(fd), "rb") as file:
            length = _header_length(file.read(8), size, filename)
            text = file.read(length)
        if len(text) < length:
            raise FormatError(f"{filename}: {len(text)} of {length} bytes of the header", path=filename)
        return cls(_decoded(text, filename), length + 8, size, framework, filename, keep_orig_dict)

    @classmethod
    def from_file(cls, filename: str, framework: Any = None) -> SafeTensorsMetadata:
        """The header of a file."""
        with open(filename, "rb", buffering=0) as file:
            return cls.from_fd(file.fileno(), filename, framework)

    def select_byte_ranges(
        self, keep_tensor: Callable[[str], bool], merge_gap: int = 4096
    ) -> list[tuple[int, int]]:
        """Ranges of the file that hold the tensors to keep, with gaps of up to ``merge_gap`` closed."""
        ranges: list[tuple[int, int]] = []
        for name, frame in self.tensors.items():
            start, end = (self.header_length + offset for offset in frame.data_offsets)
            if start == end or not keep_tensor(name):
                continue
            if ranges and start - ranges[-1][1] <= merge_gap:
                start, _ = ranges.pop()
            ranges.append((start, end))
        return ranges

    def converted(self, dtype: DType, keep_tensor: Callable[[str], bool]) -> SafeTensorsMetadata:
        """The same with another type for some tensors, as they are once loaded."""
        other = object.__new__(SafeTensorsMetadata)
        other.__dict__.update(self.__dict__)
        other.tensors = {
            name: replace(frame, dtype=dtype) if keep_tensor(name) else frame
            for name, frame in self.tensors.items()
        }
        return other

    def __repr__(self) -> str:
        return f"SafeTensorsMetadata({self.src!r}, {counted(len(self.tensors), 'tensor')})"


def _header_length(first: bytes, size: int, filename: str) -> int:
    if len(first) < 8:
        raise FormatError(f"{filename}: {size} bytes are too few for a safetensors file", path=filename)
    length = int.from_bytes(first, "little")
    if length > min(_LONGEST_HEADER, size - 8):
        raise FormatError(f"{filename}: a header of {length} bytes in a file of {size}", path=filename)
    return length


def _decoded(text: bytes, filename: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{filename}: the header is not UTF-8: {error}", path=filename) from error
