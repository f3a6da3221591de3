"""Headers, groups and devices: what programs import of `fastsafetensors.common`."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._devices import get_device_numa_node
from hoistway.compat.fastsafetensors._groups import SingleGroup
from hoistway.compat.fastsafetensors._metadata import SafeTensorsMetadata, TensorFrame

__all__ = ["SafeTensorsMetadata", "SingleGroup", "TensorFrame", "get_device_numa_node"]
