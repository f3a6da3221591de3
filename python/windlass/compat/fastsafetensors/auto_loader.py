"""`AutoLoader`, as `fastsafetensors.auto_loader` has it."""

from __future__ import annotations

from windlass.compat.fastsafetensors._loader import SafeTensorsFileLoader
from windlass.compat.fastsafetensors._parallel import AutoLoader

__all__ = ["AutoLoader", "SafeTensorsFileLoader"]
