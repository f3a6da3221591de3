"""Metadata of GGUF files: a read-only mapping whose arrays are read when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from hoistway import _native

if TYPE_CHECKING:
    import numpy as np

_FORMATS = {
    "u8": "B",
    "i8": "b",
    "u16": "H",
    "i16": "h",
    "u32": "I",
    "i32": "i",
    "f32": "f",
    "bool": "?",
    "u64": "Q",
    "i64": "q",
    "f64": "d",
}
"""Formats of numbers in a `memoryview`."""


def read_only(key_values: list[tuple[str, Any]], metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Values by key, in the order of the files, followed by the text metadata."""
    values = {
        key: MetadataArray(value) if isinstance(value, _native.Array) else value for key, value in key_values
    }
    return Metadata({**values, **{key: text for key, text in metadata.items() if key not in values}})


class Metadata(Mapping[str, Any]):
    """Keys and values that cannot be changed. Pickles and deep copies hold lists where this has arrays."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metadata({self._values!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, (self._values,)


class MetadataArray(Sequence[Any]):
    """An array of a GGUF file: a sequence of numbers, strings, or such sequences.

    All values are read when the first is used. Until then the array keeps its file open, also after the checkpoint is
    closed. An array equals a list of the same values. Pickles and deep copies are lists.
    """

    def __init__(self, native: _native.Array) -> None:
        self._native: _native.Array | None = native
        self._element = native.element
        self._len = len(native)
        self._read: memoryview | list[Any] = []

    @property
    def element(self) -> str:
        """Type of the elements, such as ``"i32"``, ``"string"`` or ``"array"``."""
        return self._element

    def tolist(self) -> list[Any]:
        """Returns all values as a new list. Raises `FormatError` for strings that are not UTF-8."""
        values = self._values
        return values.tolist() if isinstance(values, memoryview) else list(values)

    def byte_strings(self) -> list[bytes]:
        """Returns all strings as bytes. Some vocabularies have tokens that are not UTF-8."""
        if self._element != "string":
            raise TypeError(f"an array of elements of type {self._element} is not an array of strings")
        native = self._native
        return [text.encode() for text in self.tolist()] if native is None else native.byte_strings()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the numbers as a read-only array of numpy."""
        import numpy as np  # noqa: PLC0415

        values = self._values
        if not isinstance(values, memoryview):
            raise TypeError(f"an array of elements of type {self._element} is not an array of numbers")
        return np.frombuffer(values, values.format)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """For ``numpy.asarray``. Strings become text of numpy with the length of the longest one."""
        import numpy as np  # noqa: PLC0415

        array = self.numpy() if isinstance(self._values, memoryview) else None
        if copy is False and (array is None or np.dtype(dtype or array.dtype) != array.dtype):
            wanted = "numpy's" if dtype is None else str(np.dtype(dtype))
            raise ValueError(
                f"an array of elements of type {self._element} does not become one of {wanted} without a copy"
            )
        if array is None:
            return np.array(self.tolist(), dtype)
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        found = self._values[index]
        return found.tolist() if isinstance(found, memoryview) else found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MetadataArray):
            return len(self) == len(other) and self.tolist() == other.tolist()
        if isinstance(other, (list, tuple)):
            return len(self) == len(other) and self.tolist() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"MetadataArray([{self._element}; {self._len}])"

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.tolist(),)

    @property
    def _values(self) -> memoryview | list[Any]:
        native = self._native
        if native is not None:
            # In this order: other threads take what was read for it as soon as they find no file.
            self._read = _read(native)
            self._native = None
        return self._read


def _read(native: _native.Array) -> memoryview | list[Any]:
    if native.element == "string":
        return native.strings()
    if native.element == "array":
        return [MetadataArray(array) for array in native.arrays()]
    numbers: Any = memoryview(native.numbers())
    values: memoryview = numbers.cast(_FORMATS[native.element])
    return values
