"""Saving in shards: what programs import of `fastsafetensors.saver`."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._saver import (
    ParallelSaver,
    ShardPlan,
    ShardSetError,
    WriteEntry,
    per_entry_fill,
    plain_entry,
    plan_shards,
    save_sharded,
    shard_paths,
    tensor_fill,
    validate_shard_set,
    write_shards,
)

__all__ = [
    "ParallelSaver",
    "ShardPlan",
    "ShardSetError",
    "WriteEntry",
    "per_entry_fill",
    "plain_entry",
    "plan_shards",
    "save_sharded",
    "shard_paths",
    "tensor_fill",
    "validate_shard_set",
    "write_shards",
]
