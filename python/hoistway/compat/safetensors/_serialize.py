"""Files from memory that is named by address: what the module `safetensors` itself offers to its frameworks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hoistway import _native
from hoistway._save import DTYPES, Described
from hoistway.compat.safetensors._bytes import check_text, load_bytes
from hoistway.compat.safetensors._errors import safetensor_error, saved_name, translated
from hoistway.errors import OptionError

if TYPE_CHECKING:
    from os import PathLike

# Pairs of F4 elements have a name in torch alone; each in a byte of its own is not what files hold.
_DTYPES = {name: dtype for name, dtype in DTYPES.items() if name != "float4_e2m1fn"}

_HIGHEST_ADDRESS = (1 << 63) - 1


class TensorSpec:
    """Describes a tensor by the address of its bytes.

    The memory must stay valid for each call of `serialize` or `serialize_file` that takes the description.

    Args:
        dtype: The element type as torch and numpy name it, for instance ``"float32"``.
        shape: The shape. Of ``"float4_e2m1fn_x2"`` the one that torch has, which counts pairs in the last dimension.
        data_ptr: The address of the first byte.
        data_len: The number of bytes.
    """

    __slots__ = ("_data_len", "_data_ptr", "_dtype", "_shape")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        if not isinstance(dtype, str):
            raise TypeError(f"argument 'dtype': {dtype!r} is not an instance of 'str'")
        if dtype not in _DTYPES:
            names = ", ".join(_DTYPES)
            raise safetensor_error(OptionError, f"Unknown dtype {dtype!r}: it must be one of {names}")
        if isinstance(shape, (str, bytes)) or not hasattr(shape, "__iter__"):
            raise TypeError(f"argument 'shape': {shape!r} is not a sequence of integers")
        sizes = [_unsigned("shape", size) for size in shape]
        self._dtype = _DTYPES[dtype]
        if self._dtype == "F4" and sizes:
            sizes[-1] *= 2
        if sizes and sizes[-1] >> 64:
            raise safetensor_error(OptionError, f"shape {sizes} has a dimension of more than 64 bits")
        self._shape = sizes
        self._data_ptr = _unsigned("data_ptr", data_ptr)
        self._data_len = _unsigned("data_len", data_len)

    @property
    def dtype(self) -> str:
        """The element type as files name it, for instance ``"F32"``."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape that the file has; both elements of each pair of F4 are counted."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """The address of the first byte."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """The number of bytes."""
        return self._data_len

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype={self._dtype!r}, shape={self._shape}, data_ptr={self._data_ptr}, "
            f"data_len={self._data_len})"
        )


def serialize(tensor_dict: Mapping[str, TensorSpec], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of the file of these tensors."""
    described = _described(tensor_dict, metadata)
    with translated():
        return _native.save_bytes(described, metadata)


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: str | PathLike[str],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes tensors to a file. The name has the old file, whole, until the new one is."""
    path = saved_name(filename)
    described = _described(tensor_dict, metadata)
    with translated():
        _native.save_file(described, path, metadata)


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:  # noqa: A002  (the reference library's name)
    """Returns the name, ``shape``, ``dtype`` and ``data`` of each tensor in the bytes of a file, in its order."""
    return [
        (name, {"shape": list(tensor.shape), "dtype": tensor.dtype, "data": bytearray(tensor.tobytes())})
        for name, tensor in load_bytes(bytes, "raw").items()
    ]


def _described(tensors: Any, metadata: Any) -> list[Described]:
    if not isinstance(tensors, dict):
        raise TypeError(f"argument 'tensor_dict': {tensors!r} is not an instance of 'dict'")
    check_text(tensors, metadata)
    return [_one_described(name, spec) for name, spec in tensors.items()]


def _one_described(name: str, spec: Any) -> Described:
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"tensor {name!r} is described by {spec!r}, which is not an instance of 'TensorSpec'")
    address, length = spec.data_ptr, spec.data_len
    # What the native part is told is memory must be memory that a process can have.
    if length and (not address or address + length > _HIGHEST_ADDRESS):
        raise safetensor_error(
            OptionError,
            f"tensor {name!r} has {length} bytes at address {address}, where no memory is",
            tensor=name,
        )
    return Described(name, spec.dtype, tuple(spec.shape), address, length, "cpu", spec)


def _unsigned(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"argument {name!r}: {value!r} is not an integer") from error
    if not 0 <= number < 1 << 64:
        raise OverflowError(f"argument {name!r}: {value!r} is not a number of 64 bits without a sign")
    return number
