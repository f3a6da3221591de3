"""Writes the models that the benchmark loads: plain safetensors files of random bytes.

No framework is needed, so that making a model says nothing about any loader.
"""

import json
import struct
from pathlib import Path

import numpy as np

HEADER_ALIGNMENT = 8


def write_file(path: Path, tensors: list[tuple[str, str, list[int], int]], seed: int) -> None:
    """Writes one file of (name, dtype, shape, bytes) tensors with random contents."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    generator = np.random.default_rng(seed)
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        left = offset
        while left > 0:
            size = min(left, 64 << 20)
            file.write(generator.bytes(size))
            left -= size
    partial.rename(path)


def transformer(directory: Path, total_bytes: int, shards: int) -> list[Path]:
    """A bfloat16 model shaped like a decoder-only transformer, in shards of about equal size."""
    hidden, intermediate, vocabulary = 2048, 8192, 32000
    matrices = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [hidden // 4, hidden],
        "self_attn.v_proj": [hidden // 4, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [intermediate, hidden],
        "mlp.up_proj": [intermediate, hidden],
        "mlp.down_proj": [hidden, intermediate],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    shapes = [("model.embed_tokens.weight", [vocabulary, hidden])]
    size = 2 * vocabulary * hidden
    layer = 0
    while size < total_bytes:
        for name, shape in matrices.items():
            shapes.append((f"model.layers.{layer}.{name}.weight", shape))
            size += 2 * int(np.prod(shape))
        layer += 1
    share = size / shards
    groups: list[list[tuple[str, str, list[int], int]]] = [[] for _ in range(shards)]
    done = 0
    for name, shape in shapes:
        tensor_bytes = 2 * int(np.prod(shape))
        groups[min(shards - 1, int(done / share))].append((name, "BF16", shape, tensor_bytes))
        done += tensor_bytes
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for seed, (path, group) in enumerate(zip(paths, groups, strict=True)):
        if not path.exists():
            write_file(path, group, seed)
    weight_map = {name: path.name for path, group in zip(paths, groups, strict=True) for name, *_ in group}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


def small_tensors(path: Path, count: int) -> list[Path]:
    """One file of many tensors of 16 to 1024 float32 elements."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths = np.random.default_rng(0).integers(16, 1025, count)
        tensors = [(f"blocks.{i}.scale", "F32", [int(n)], 4 * int(n)) for i, n in enumerate(lengths)]
        write_file(path, tensors, 1)
    return [path]
