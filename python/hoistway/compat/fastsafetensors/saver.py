"""Saving in shards: what programs import of `fastsafetensors.saver`."""

from __future__ import annotations

from hoistway.compat.fastsafetensors._saver import (
    ParallelSaver,
    ShardSetError,
    WriteEntry,
    per_entry_fill,
    plain_entry,
    shard_paths,
    tensor_fill,
    validate_shard_set,
)

__all__ = [
    "ParallelSaver",
    "ShardSetError",
    "WriteEntry",
    "per_entry_fill",
    "plain_entry",
    "shard_paths",
    "tensor_fill",
    "validate_shard_set",
]
