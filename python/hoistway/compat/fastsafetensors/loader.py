"""Loaders of files: what programs import of `fastsafetensors.loader`."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._loader import SafeTensorsFileLoader
from hoistway.compat.fastsafetensors._open import fastsafe_open

__all__ = ["SafeTensorsFileLoader", "fastsafe_open"]
