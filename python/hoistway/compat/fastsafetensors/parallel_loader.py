"""`ParallelLoader`, as `fastsafetensors.parallel_loader` has it."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._parallel import ParallelLoader

__all__ = ["ParallelLoader"]
