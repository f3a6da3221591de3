"""Errors of this package alone."""

from __future__ import annotations

from hoistway.errors import MemoryBudgetError, TensorNotFoundError


class UnknownTensorError(TensorNotFoundError, ValueError):
    """No tensor of this name, or one that was filtered out. Callers of fastsafetensors expect a `ValueError`."""


class BudgetInfeasibleError(MemoryBudgetError, ValueError):
    """The tensors do not fit into the memory that they may have, however they are loaded."""
