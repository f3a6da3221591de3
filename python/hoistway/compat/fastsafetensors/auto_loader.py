"""`AutoLoader`, as `fastsafetensors.auto_loader` has it."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._loader import SafeTensorsFileLoader
from hoistway.compat.fastsafetensors._parallel import AutoLoader

__all__ = ["AutoLoader", "SafeTensorsFileLoader"]
