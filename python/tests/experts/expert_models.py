"""Small models with experts, and what their files hold."""

from __future__ import annotations

import json
from pathlib import Path

import hoistway
import numpy as np
from conftest import write_model

LAYERS = (0, 2)
EXPERTS = 8
TOP_K = 2
HIDDEN, INNER = 64, 96
EXPERT_BYTES = 3 * HIDDEN * INNER * 2
SLOT_BYTES = EXPERT_BYTES + 3 * 8192
"""Bytes of a slot at most: each part has the blocks that it touches."""

BASE = "model.layers.{layer}.mlp.experts"


def write_experts(directory: Path, *, stacked: bool = False, seed: int = 0) -> Path:
    """Writes a model: an expert each, or stacked ones of gate and up together."""
    tensors: dict[str, tuple[str, list[int]]] = {"model.embed.weight": ("F32", [33, HIDDEN])}
    for layer in LAYERS:
        base = BASE.format(layer=layer)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = ("BF16", [EXPERTS, HIDDEN])
        if stacked:
            tensors[f"{base}.gate_up_proj"] = ("BF16", [EXPERTS, 2 * INNER, HIDDEN])
            tensors[f"{base}.down_proj"] = ("BF16", [EXPERTS, HIDDEN, INNER])
            continue
        for expert in range(EXPERTS):
            tensors[f"{base}.{expert}.gate_proj.weight"] = ("BF16", [INNER, HIDDEN])
            tensors[f"{base}.{expert}.up_proj.weight"] = ("BF16", [INNER, HIDDEN])
            tensors[f"{base}.{expert}.down_proj.weight"] = ("BF16", [HIDDEN, INNER])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"num_experts_per_tok": TOP_K}))
    return write_model(directory / "model.safetensors", tensors, seed=seed)


def expert_bytes(model: Path) -> dict[tuple[int, int], dict[str, bytes]]:
    """The bytes of each part of each expert, read by numpy's own means."""
    with open(model, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        data = np.frombuffer(file.read(), np.uint8)

    def of(name: str, part: int = 0, parts: int = 1) -> bytes:
        start, end = header[name]["data_offsets"]
        size = (end - start) // parts
        return data[start + part * size : start + (part + 1) * size].tobytes()

    found = {}
    for layer in LAYERS:
        base = BASE.format(layer=layer)
        for expert in range(EXPERTS):
            if f"{base}.gate_up_proj" in header:
                names = {"gate_up": "gate_up_proj", "down": "down_proj"}
                parts = {role: of(f"{base}.{name}", expert, EXPERTS) for role, name in names.items()}
            else:
                parts = {role: of(f"{base}.{expert}.{role}_proj.weight") for role in ("gate", "up", "down")}
            found[layer, expert] = parts
    return found


def open_store(model: Path, experts: float, **options) -> hoistway.experts.ExpertStore:
    """A store with room for so many experts."""
    options = {"framework": "raw", **options}
    return hoistway.experts.ExpertStore.open(model, budget=int(experts * SLOT_BYTES), **options)
