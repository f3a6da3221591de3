"""Expert parallelism: what `fastsafetensors.ep_slice` has."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._experts import (
    expert_parallel_filter,
    expert_parallel_filter_from_env,
    owned_expert_range,
)

__all__ = ["expert_parallel_filter", "expert_parallel_filter_from_env", "owned_expert_range"]
