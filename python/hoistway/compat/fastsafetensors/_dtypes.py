"""Element types by the names that safetensors gives them, and torch's types for them."""

from __future__ import annotations

from enum import Enum
from typing import Any

from hoistway.errors import UnsupportedDtypeError


class DType(Enum):
    """An element type. `AUTO` is the one that the file has."""

    BOOL = "BOOL"
    I8 = "I8"
    I16 = "I16"
    I32 = "I32"
    I64 = "I64"
    U8 = "U8"
    U16 = "U16"
    U32 = "U32"
    U64 = "U64"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    BF16 = "BF16"
    C64 = "C64"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E8M0 = "F8_E8M0"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    F4 = "F4"
    AUTO = "AUTO"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return _BITS[self]

    def to_torch(self) -> Any:
        """The type that torch has for it."""
        import torch  # noqa: PLC0415

        dtype = getattr(torch, _TORCH_NAMES.get(self, ""), None)
        if dtype is None:
            raise UnsupportedDtypeError(f"torch {torch.__version__} has no type for {self.value}")
        return dtype

    @classmethod
    def from_torch(cls, dtype: Any) -> DType:
        """The type that safetensors has for torch's."""
        name = str(dtype).removeprefix("torch.")
        for own, torch_name in _TORCH_NAMES.items():
            if torch_name == name:
                return own
        raise UnsupportedDtypeError(f"safetensors has no type for torch's {name}")


_TORCH_NAMES = {
    DType.BOOL: "bool",
    DType.I8: "int8",
    DType.I16: "int16",
    DType.I32: "int32",
    DType.I64: "int64",
    DType.U8: "uint8",
    DType.U16: "uint16",
    DType.U32: "uint32",
    DType.U64: "uint64",
    DType.F16: "float16",
    DType.F32: "float32",
    DType.F64: "float64",
    DType.BF16: "bfloat16",
    DType.C64: "complex64",
    DType.F8_E5M2: "float8_e5m2",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E5M2FNUZ: "float8_e5m2fnuz",
    DType.F8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8_E8M0: "float8_e8m0fnu",
    DType.F4: "float4_e2m1fn_x2",
}

_BITS = {
    **dict.fromkeys([DType.F64, DType.I64, DType.U64, DType.C64], 64),
    **dict.fromkeys([DType.F32, DType.I32, DType.U32], 32),
    **dict.fromkeys([DType.F16, DType.BF16, DType.I16, DType.U16], 16),
    **dict.fromkeys([DType.BOOL, DType.I8, DType.U8, DType.F8_E5M2, DType.F8_E4M3], 8),
    **dict.fromkeys([DType.F8_E5M2FNUZ, DType.F8_E4M3FNUZ, DType.F8_E8M0], 8),
    **dict.fromkeys([DType.F6_E2M3, DType.F6_E3M2], 6),
    DType.F4: 4,
}

DTYPE_SIZES = {dtype: bits // 8 if bits % 8 == 0 else bits / 8 for dtype, bits in _BITS.items()}
"""Bytes of one element, a fraction for types that are packed."""
