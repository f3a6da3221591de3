"""Headers of safetensors files: what tensors there are, and where."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hoistway import _native
from hoistway._regular import open_regular
from hoistway._words import counted
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.errors import FormatError, SliceError

_LONGEST_HEADER = 100_000_000
_PREFIX_BYTES = 8
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
        """A part. Dimensions that are indexed with a number stay, with size 1.

        A part without elements is what fastsafetensors has for it: a frame without dimensions that is not ``sliced``.
        """
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > len(self.shape):
            raise SliceError(f"shape {self.shape} is indexed with {len(items)} dimensions")
        shape, strides, offsets = list(self.shape), list(self.strides), list(self.offsets)
        for dim, item in enumerate(items):
            chosen = self._chosen(dim, item)
            if not chosen:
                return replace(self, shape=[], strides=[], offsets=[], sliced=False)
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
    """The header of one file. `tensors` has the frames in the order of their bytes.

    The header is held to the rules of safetensors, as hoistway holds files to them when it opens them.

    Args:
        string: The header's text.
        header_length: Bytes of the file before the first tensor.
        size_bytes: Bytes of the file.
        framework: Kept, for those who ask.
        src: The file's name, for errors.
        keep_orig_dict: Whether to keep the entries as `ser`.
        lenient: As for `hoistway.load_file`: takes files with padding after the last tensor.
    """

    def __init__(  # noqa: PLR0917  (the parameters are the interface's)
        self,
        string: str,
        header_length: int,
        size_bytes: int,
        framework: Any = None,
        src: str = "",
        keep_orig_dict: bool = False,
        *,
        lenient: bool | None = None,
    ) -> None:
        self.src = src
        self.framework = framework
        self.header_length = header_length
        self.size_bytes = size_bytes
        self.aligned = header_length % _POINTER_ALIGNMENT == 0
        if header_length > size_bytes:
            raise FormatError(f"{src}: a header of {header_length} bytes in a file of {size_bytes}", path=src)
        text = string.encode(errors="surrogatepass")
        file_len = _PREFIX_BYTES + len(text) + size_bytes - header_length
        tensors, metadata = _native.parse_header(text, file_len, src, lenient=lenient)
        self.metadata: Any = "" if metadata is None else metadata
        if keep_orig_dict:
            self.ser = json.loads(string)
            self.ser.pop("__metadata__", None)
        self.tensors: dict[str, TensorFrame] = {
            name: TensorFrame.from_buffer({"dtype": dtype, "shape": shape, "data_offsets": offsets})
            for name, dtype, shape, offsets in tensors
        }

    @classmethod
    def from_buffer(
        cls,
        buf: int,
        buffer_len: int,
        filename: str,
        framework: Any = None,
        *,
        lenient: bool | None = None,
    ) -> SafeTensorsMetadata:
        """The header of a file in memory at this address."""
        length = _header_length(ctypes.string_at(buf, 8) if buffer_len >= 8 else b"", buffer_len, filename)
        text = ctypes.string_at(buf + 8, length)
        return cls(_decoded(text, filename), length + 8, buffer_len, framework, filename, lenient=lenient)

    @classmethod
    def from_fd(
        cls,
        fd: int,
        filename: str,
        framework: Any = None,
        keep_orig_dict: bool = False,
        *,
        lenient: bool | None = None,
    ) -> SafeTensorsMetadata:
        """The header of an open file, which is read from where it stands."""
        size = os.fstat(fd).st_size
        with open(os.dup(fd), "rb") as file:
            length = _header_length(file.read(8), size, filename)
            text = file.read(length)
        if len(text) < length:
            raise FormatError(f"{filename}: {len(text)} of {length} bytes of the header", path=filename)
        return cls(
            _decoded(text, filename),
            length + 8,
            size,
            framework,
            filename,
            keep_orig_dict,
            lenient=lenient,
        )

    @classmethod
    def from_file(
        cls, filename: str, framework: Any = None, *, lenient: bool | None = None
    ) -> SafeTensorsMetadata:
        """The header of a file."""
        with open(open_regular(filename), "rb", buffering=0) as file:
            return cls.from_fd(file.fileno(), filename, framework, lenient=lenient)

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
