"""The Python in the pages runs as it is printed there, but for what needs GPUs, object stores or 3FS."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import write_model

sys.path.append(str(Path(__file__).parents[2] / "testkit" / "snippets"))

import snippets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("snippets")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(**sizes, vocab_size=32000, intermediate_size=1024)
    transformers.LlamaForCausalLM(llama).to(torch.bfloat16).save_pretrained(folder / "models/llama")
    qwen = transformers.Qwen3MoeConfig(
        **sizes, vocab_size=64, moe_intermediate_size=32, num_experts=32, num_experts_per_tok=2
    )
    transformers.Qwen3MoeForCausalLM(qwen).save_pretrained(folder / "models/qwen3-30b-a3b")
    for name in ("model.safetensors", "model-00001-of-00002.safetensors"):
        write_model(folder / name, {"embed": ("F32", [100, 8]), "layers.0.weight": ("F16", [8, 8])})
    write_gguf(folder / "model-Q4_K_M.gguf")
    return folder


def write_gguf(path: Path) -> None:
    """Writes a GGUF with a vocabulary and a quantised tensor, by the package gguf."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["<s>", "a"])
    packed = np.zeros((32, 144), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("page", snippets.pages(), ids=lambda page: str(page.relative_to(snippets.ROOT)))
def test_the_python_of_a_page_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("fastsafetensors", "fastsafetensor_3fs_reader"):
        # Put back, as pages replace them.
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    try:
        exec(compile(snippets.module(page, is_run=True), page, "exec"), {"__name__": "snippet"})
    finally:
        if drop_in := sys.modules.get("hoistway.compat.safetensors"):
            drop_in.uninstall()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
