"""Element types and devices: what `fastsafetensors.st_types` has."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._devices import Device, DeviceType
from hoistway.compat.fastsafetensors._dtypes import DTYPE_SIZES, DType

__all__ = ["DTYPE_SIZES", "DType", "Device", "DeviceType"]
