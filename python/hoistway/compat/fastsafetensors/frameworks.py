"""Tensors and frameworks: what programs import of `fastsafetensors.frameworks`."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._absent import absent
from hoistway.compat.fastsafetensors._framework import FrameworkOpBase, TensorBase
from hoistway.compat.fastsafetensors._framework import framework_of as get_framework_op

__getattr__ = absent(
    "fastsafetensors.frameworks",
    {"ProcessGroupBase": "ranks travel by torch.distributed; loaders take its process groups as they are"},
)

__all__ = ["FrameworkOpBase", "TensorBase", "get_framework_op"]
