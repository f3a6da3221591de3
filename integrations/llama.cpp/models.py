"""Makes models: mixtures of experts of random weights, which llama.cpp evaluates like any other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np

HEADS = 8
HEADS_KV = 2
HEAD_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """How large a model is."""

    layers: int
    width: int
    experts: int
    experts_used: int
    expert_width: int
    vocabulary: int


SMALL = Shape(layers=4, width=256, experts=32, experts_used=4, expert_width=128, vocabulary=2048)
"""15 MB."""
MIDDLE = Shape(layers=8, width=1024, experts=64, experts_used=4, expert_width=512, vocabulary=8192)
"""873 MB."""


DENSE = replace(SMALL, experts=0, experts_used=0)
"""Without experts, 5 MB."""


def of_size(megabytes: int) -> Shape:
    """`MIDDLE` with as many layers as make about so many megabytes."""
    return replace(MIDDLE, layers=max(2, round((megabytes - 18) / 107)))


def expert_bytes(shape: Shape) -> int:
    """Bytes of one expert, quantized to Q8_0."""
    return 3 * shape.width * shape.expert_width * 34 // 32


def make(
    path: Path,
    shape: Shape,
    *,
    split_bytes: int = 0,
    tied: bool = False,
    quantization: str = "Q8_0",
    router: str = "float32",
    without: str = "",
    tokenizer: bool = False,
) -> Path:
    """Makes a model unless it is there; its path, or that of its first file.

    Args:
        path: Where to write it.
        shape: How large.
        split_bytes: Begins a new file after so many bytes; zero for one file.
        tied: Whether the token embedding is the output too.
        quantization: What ggml calls the type of the large weights.
        router: What numpy calls the type of the routers.
        without: Norms whose names have this in them are left out.
        tokenizer: Whether the model has tokens as text, which servers ask for.
    """
    if path.exists():
        return path
    if split_bytes and (made := sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))):
        return made[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        writer = gguf.GGUFWriter(Path(folder) / path.name, architecture(shape), split_max_size=split_bytes)
        describe(writer, shape)
        if tokenizer:
            add_tokens(writer, shape.vocabulary)
        else:
            writer.add_tokenizer_model("no_vocab")
            writer.add_vocab_size(shape.vocabulary)
        kind = gguf.GGMLQuantizationType[quantization]
        add_tensors(writer, shape, tied=tied, kind=kind, router_type=router, without=without)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        # Whole when they get here, and the first, by which the others are found, last.
        for file in sorted(Path(folder).iterdir(), reverse=True):
            first = file.rename(path.parent / file.name)
    return first


def make_adapter(path: Path, shape: Shape, *, of_experts: bool) -> Path:
    """Makes an adapter (LoRA) of the first layer: of its experts, or of its attention."""
    random = np.random.default_rng(9)
    rank = 4
    writer = gguf.GGUFWriter(path, architecture(shape))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 8.0)
    name = "blk.0.ffn_gate_exps.weight" if of_experts else "blk.0.attn_q.weight"
    stack = (shape.experts,) if of_experts else ()
    rows = shape.expert_width if of_experts else HEADS * HEAD_SIZE
    writer.add_tensor(f"{name}.lora_a", random.standard_normal((*stack, rank, shape.width), dtype=np.float32))
    writer.add_tensor(f"{name}.lora_b", random.standard_normal((*stack, rows, rank), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def architecture(shape: Shape) -> str:
    """What llama.cpp calls a model of this shape."""
    return "qwen3moe" if shape.experts else "qwen3"


def describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Writes the metadata that llama.cpp asks for."""
    writer.add_context_length(512)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.expert_width)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.expert_width)


def add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Writes as many tokens: bytes and words of no meaning, none of which ends a text."""
    kind = gguf.TokenType
    special = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL)]
    tokens = [*special, *((f"<0x{byte:02X}>", kind.BYTE) for byte in range(256))]
    tokens += [(f"\u2581w{number}", kind.NORMAL) for number in range(count - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types([int(kind) for _, kind in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_tensors(
    writer: gguf.GGUFWriter,
    shape: Shape,
    *,
    tied: bool,
    kind: gguf.GGMLQuantizationType,
    router_type: str,
    without: str,
) -> None:
    """Adds all weights, the large ones quantized."""
    random = np.random.default_rng(7)

    def quantized(name: str, *extents: int) -> None:
        values = random.standard_normal(extents, dtype=np.float32) / np.float32(np.sqrt(extents[-1]))
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def ones(name: str, extent: int) -> None:
        if without and without in name:
            return
        writer.add_tensor(name, np.ones(extent, np.float32))

    width = shape.width
    quantized("token_embd.weight", shape.vocabulary, width)
    ones("output_norm.weight", width)
    if not tied:
        quantized("output.weight", shape.vocabulary, width)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        ones(f"{prefix}attn_norm.weight", width)
        ones(f"{prefix}ffn_norm.weight", width)
        quantized(f"{prefix}attn_q.weight", HEADS * HEAD_SIZE, width)
        quantized(f"{prefix}attn_k.weight", HEADS_KV * HEAD_SIZE, width)
        quantized(f"{prefix}attn_v.weight", HEADS_KV * HEAD_SIZE, width)
        quantized(f"{prefix}attn_output.weight", width, HEADS * HEAD_SIZE)
        ones(f"{prefix}attn_k_norm.weight", HEAD_SIZE)
        ones(f"{prefix}attn_q_norm.weight", HEAD_SIZE)
        if not shape.experts:
            quantized(f"{prefix}ffn_gate.weight", shape.expert_width, width)
            quantized(f"{prefix}ffn_down.weight", width, shape.expert_width)
            quantized(f"{prefix}ffn_up.weight", shape.expert_width, width)
            continue
        router = random.standard_normal((shape.experts, width), dtype=np.float32) / np.float32(np.sqrt(width))
        writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router.astype(router_type))
        quantized(f"{prefix}ffn_gate_exps.weight", shape.experts, shape.expert_width, width)
        quantized(f"{prefix}ffn_down_exps.weight", shape.experts, width, shape.expert_width)
        quantized(f"{prefix}ffn_up_exps.weight", shape.experts, shape.expert_width, width)
