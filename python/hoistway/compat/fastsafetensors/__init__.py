"""The interface of fastsafetensors 0.5, with hoistway behind it.

Examples:
    >>> import hoistway.compat.fastsafetensors as fastsafetensors
"""

from __future__ import annotations

import importlib
import types

from hoistway.compat.fastsafetensors._config import LoaderConfig, load_config
from hoistway.compat.fastsafetensors._copiers import register_copier_constructor
from hoistway.compat.fastsafetensors._devices import Device, DeviceType, get_device_numa_node
from hoistway.compat.fastsafetensors._dtypes import DType
from hoistway.compat.fastsafetensors._errors import BudgetInfeasibleError, UnknownTensorError
from hoistway.compat.fastsafetensors._experts import (
    expert_parallel_filter,
    expert_parallel_filter_from_env,
    owned_expert_range,
)
from hoistway.compat.fastsafetensors._files_buffer import FilesBufferOnDevice
from hoistway.compat.fastsafetensors._groups import SingleGroup
from hoistway.compat.fastsafetensors._loader import SafeTensorsFileLoader
from hoistway.compat.fastsafetensors._metadata import SafeTensorsMetadata, TensorFrame
from hoistway.compat.fastsafetensors._open import fastsafe_open
from hoistway.compat.fastsafetensors._parallel import AutoLoader, ParallelLoader
from hoistway.compat.fastsafetensors._saver import ParallelSaver

__version__ = "0.5.0"  # of the interface

_MODULES = (
    "auto_loader",
    "common",
    "config",
    "copier",
    "cpp",
    "ep_slice",
    "file_buffer",
    "frameworks",
    "loader",
    "parallel_loader",
    "saver",
    "st_types",
)


def __getattr__(name: str) -> types.ModuleType:
    """The modules below, once they are asked for: programs find them after the import of the package alone."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AutoLoader",
    "BudgetInfeasibleError",
    "DType",
    "Device",
    "DeviceType",
    "FilesBufferOnDevice",
    "LoaderConfig",
    "ParallelLoader",
    "ParallelSaver",
    "SafeTensorsFileLoader",
    "SafeTensorsMetadata",
    "SingleGroup",
    "TensorFrame",
    "UnknownTensorError",
    "expert_parallel_filter",
    "expert_parallel_filter_from_env",
    "fastsafe_open",
    "get_device_numa_node",
    "load_config",
    "owned_expert_range",
    "register_copier_constructor",
]
