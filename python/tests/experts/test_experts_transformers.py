"""Models of transformers whose experts come from storage: the same results as eager, bit by bit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hoistway.errors import FormatError, OptionError
from hoistway.experts import ExpertStore

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
from hoistway.experts import transformers as streamed  # noqa: E402

LAYERS, EXPERTS, TOP_K, TOKENS = 3, 8, 2, 6
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 128,
}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that compute spin while they wait, and keep those from the processor that read."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config_of(kind: str) -> Any:
    if kind == "qwen3":
        return transformers.Qwen3MoeConfig(
            **SIZES, intermediate_size=64, moe_intermediate_size=48, num_experts=EXPERTS, mlp_only_layers=[1]
        )
    if kind == "mixtral":
        return transformers.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=EXPERTS)
    return transformers.GptOssConfig(
        **SIZES,
        intermediate_size=48,
        num_local_experts=EXPERTS,
        layer_types=["full_attention"] * LAYERS,
        tie_word_embeddings=False,
    )


@pytest.fixture(params=["qwen3", "mixtral", "gpt_oss"])
def directory(request, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = config_of(request.param)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            # Initialisers leave biases at zero, where nothing can be wrong with them.
            parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def prompt(batch: int = 1) -> Any:
    return torch.arange(1, 1 + 10 * batch).reshape(batch, 10) % SIZES["vocab_size"]


def generated(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )


def eager(directory: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, experts_implementation="eager", **options
    )


def expert_size(directory: Path) -> int:
    layers = streamed.ExpertStore.open(directory, budget="1GiB", framework="raw").catalog.layers
    return max(layer.expert_bytes for layer in layers.values())


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_and_logits_are_those_of_eager(directory: Path, batch: int) -> None:
    reference = generated(eager(directory), prompt(batch))
    size = expert_size(directory)
    for experts in (LAYERS * EXPERTS + 1, 6, 2):
        budget = experts * (size + 3 * 8192)
        model = streamed.from_pretrained(directory, budget=budget)
        found = generated(model, prompt(batch))
        assert torch.equal(found.sequences, reference.sequences)
        assert all(torch.equal(a, b) for a, b in zip(found.logits, reference.logits, strict=True))
        stats = model.expert_store.stats()
        assert stats["held_bytes"] <= budget + stats["largest_batch_bytes"]
        assert stats["peak_bytes"] <= budget + stats["largest_batch_bytes"]
        assert stats["misses"] > 0
        # The prompt is one visit of each layer.
        assert stats["tokens"] == TOKENS
        if experts == 2:
            assert stats["evictions"] > 0


def test_experts_stay_on_the_meta_device_and_all_else_is_loaded(directory: Path) -> None:
    reference = eager(directory)
    model = streamed.from_pretrained(directory, budget="16MiB")
    assert type(model) is type(reference)
    expected = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    stacked = [name for name in found if name.endswith("experts.down_proj")]
    assert stacked
    for name, parameter in found.items():
        assert (parameter.dtype, parameter.shape) == (expected[name].dtype, expected[name].shape)
        is_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        assert parameter.is_meta == is_expert
        assert is_expert or torch.equal(parameter, expected[name])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, reference.get_buffer(name))
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()


def test_other_types_are_converted_as_transformers_does(directory: Path) -> None:
    reference = generated(eager(directory, dtype=torch.float32), prompt())
    model = streamed.from_pretrained(directory, budget="16MiB", dtype=torch.float32)
    found = generated(model, prompt())
    assert torch.equal(found.sequences, reference.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, reference.logits, strict=True))


def test_a_trace_is_recorded_that_replays(directory: Path, tmp_path: Path) -> None:
    traces = [tmp_path / "eager.jsonl", tmp_path / "streamed.jsonl"]
    models = [eager(directory), streamed.from_pretrained(directory, budget="16MiB")]
    for model, trace in zip(models, traces, strict=True):
        with streamed.record(model, trace, name="tiny"):
            generated(model, prompt())
            generated(model, prompt())
        # Nothing is recorded outside of the context.
        generated(model, prompt())
    assert traces[0].read_text() == traces[1].read_text()
    header, *visits = map(json.loads, traces[0].read_text().splitlines())
    layers = [layer["layer"] for layer in header["layers"]]
    assert (header["hoistway_trace"], header["model"], header["experts_per_token"]) == (1, "tiny", TOP_K)
    assert header["layers"][0]["expert_bytes"] == expert_size(directory)
    # The token that is generated last is not looked at.
    assert len(visits) == 2 * len(layers) * (10 + TOKENS - 1)
    for turn in (0, 1):
        for phase, count in (("prefill", 10), ("decode", TOKENS - 1)):
            own = [visit for visit in visits if (visit["turn"], visit["phase"]) == (turn, phase)]
            assert len({visit["step"] for visit in own}) == count
            assert sorted({visit["layer"] for visit in own}) == layers
    store = ExpertStore.open(
        directory, budget="1MiB", policy="static-profile", profile=traces[0], framework="raw"
    )
    assert store.stats()["policy"] == "static-profile"


def test_the_command_replays_a_recorded_trace(directory: Path, tmp_path: Path) -> None:
    target = Path(__file__).parents[3] / "target"
    command = next(
        (
            target / kind / "hoistway"
            for kind in ("release", "debug")
            if (target / kind / "hoistway").exists()
        ),
        None,
    )
    if command is None:
        pytest.skip("the command was not built: cargo build --package hoistway-cli")
    trace = tmp_path / "trace.jsonl"
    model = streamed.from_pretrained(directory, budget="16MiB")
    with streamed.record(model, trace):
        generated(model, prompt())
    done = subprocess.run(
        [command, "moe", "replay", trace, "--budget", "2c", "--policy", "ewma2", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["policy"] == "ewma2"
    assert row["holes"]["short_visits"] == row["holes"]["visits"] == 0
    assert 0 < row["hit_rate"] <= 1


def test_other_conversions_of_experts_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    stack, join = loading.MergeModulelist(dim=0), loading.Concatenate(dim=1)
    for sources, operations in (
        (["experts.gate_up_proj"], [loading.Transpose(1, 2)]),
        (["experts.*.gate_proj.weight", "experts.*.up_proj.weight"], [stack]),
        (["experts.*.up_proj.weight", "experts.*.gate_proj.weight"], [stack, join]),
    ):
        conversion = loading.WeightConverter(
            source_patterns=sources, target_patterns=["experts.gate_up_proj"], operations=operations
        )
        monkeypatch.setattr(streamed, "get_model_conversion_mapping", lambda model, own=conversion: [own])
        with pytest.raises(OptionError, match="converts the experts"):
            streamed.from_pretrained(directory, budget="16MiB")


def test_a_streamed_model_refuses_what_needs_all_experts(directory: Path, tmp_path: Path) -> None:
    model = streamed.from_pretrained(directory, budget="16MiB")
    module = next(iter(streamed.expert_modules(model).values()))
    visit = streamed._Visit(module._hoistway, [0, 1])
    weights = streamed._StandIn(module, visit).down_proj
    assert weights[torch.tensor(1)].shape == weights.shape[1:]
    with pytest.raises(OptionError, match="several experts"):
        weights[0:2]
    with pytest.raises(OptionError, match="did not choose"):
        weights[2]
    with pytest.raises(OptionError, match="asks for transpose of all experts"):
        weights.transpose(1, 2)
    visit.close()
    with pytest.raises(NotImplementedError, match="meta"):
        model.save_pretrained(tmp_path / "copy")


def test_what_cannot_be_streamed_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not a directory"):
        streamed.from_pretrained(tmp_path / "nothing", budget="16MiB")
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, experts_implementation="hoistway")
    with pytest.raises(OptionError, match="from_pretrained"):
        plain(prompt())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(OptionError, match="quantised"):
        streamed.from_pretrained(directory, budget="16MiB")
    dense = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **{name: size for name, size in SIZES.items() if name != "num_experts_per_tok"},
            intermediate_size=64,
        )
    )
    dense.save_pretrained(tmp_path / "dense")
    with pytest.raises((OptionError, FormatError), match="expert"):
        streamed.from_pretrained(tmp_path / "dense", budget="16MiB")
