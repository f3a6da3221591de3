"""vLLM's own loaders, configurations and models, with hoistway reading the weights."""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plugin_hosts import (
    HOST_WARNINGS,
    host_is_before,
    import_host,
    in_store,
    install,
    logged,
    on_ranks,
    shared_kib,
)
from safetensors.torch import save_file

import_host("vllm.model_executor.model_loader")

import vllm.plugins  # noqa: E402
from hoistway.errors import FormatError, OptionError, TruncatedError  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from vllm.config import (  # noqa: E402
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import (  # noqa: E402
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader  # noqa: E402

pytestmark = HOST_WARNINGS
LOG = "vllm.plugins.hoistway"

encoder_only = pytest.mark.skipif(
    host_is_before("vllm", "0.31"),
    reason="vLLM reads all files with --mm-encoder-only",
)
unused_weights = pytest.mark.skipif(
    host_is_before("vllm", "0.32"),
    reason="models cannot tell vLLM which weights they do not use",
)


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    """The plug-in, found and called by vLLM as in an installation."""
    with pytest.MonkeyPatch.context() as patch:
        site = tmp_path_factory.mktemp("site")
        install(site)
        patch.syspath_prepend(site)
        patch.setattr(vllm.plugins, "plugins_loaded", False)
        # On processors with AMX vLLM packs weights by its compiled kernels, which its sources lack.
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        vllm.plugins.load_general_plugins()
        # vLLM before 0.31 looks a compiled kernel up when it builds a Llama, and calls it only when that computes.
        kernels = torch.library.Library("_C", "FRAGMENT")
        if host_is_before("vllm", "0.31"):
            kernels.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
        yield


@pytest.fixture(params=["one file", "shards"])
def llama(request, tmp_path):
    """A small Llama, as transformers saves it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "llama", max_shard_size="40KB" if request.param == "shards" else "1GB")
    return tmp_path / "llama"


def load_llama(path, load_format, *, rank=0, ranks=1, store=None, **extra):
    """The parameters that vLLM's model has after `load_model`."""
    model_config = ModelConfig(
        model=str(path), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
    )
    load_config = LoadConfig(load_format=load_format, model_loader_extra_config=extra, use_tqdm_on_load=False)
    config = VllmConfig(model_config=model_config, load_config=load_config, device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"file://{store}", rank, backend="gloo")
        initialize_model_parallel(ranks)
        try:
            model = get_model_loader(load_config).load_model(vllm_config=config, model_config=model_config)
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Module(torch.nn.Module):
    """A model that takes what it is given."""

    def __init__(self, **attributes):
        super().__init__()
        self.given = {}
        for name, value in attributes.items():
            setattr(self, name, value)

    def load_weights(self, weights):
        self.given.update(weights)


def model_config(path, **changes):
    plain = {
        "model_weights": "",
        "quantization": None,
        "multimodal_config": None,
        "is_moe": False,
        "revision": None,
    }
    return SimpleNamespace(model=str(path), **{**plain, **changes})


def load(path, model, *, config=None, parallel=None, **settings):
    """Loads with vLLM's loader for the format, and returns the lines of the log."""
    loader = get_model_loader(LoadConfig(load_format="hoistway", use_tqdm_on_load=False, **settings))
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))), logged(LOG) as lines:
        if parallel is not None:
            vllm.config.get_current_vllm_config().parallel_config = parallel
        loader.load_weights(model, config or model_config(path))
    return lines


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts a store that has the folders of the directory as buckets; vLLM fetches from there what is not weights."""
    monkeypatch.setenv("VLLM_ASSETS_CACHE", str(tmp_path / "assets"))
    with ExitStack() as stack:

        def serve():
            pull = stack.enter_context(in_store(tmp_path))
            monkeypatch.setattr("vllm.transformers_utils.runai_utils.runai_pull_files", pull)

        yield serve


@pytest.fixture
def checkpoint(tmp_path):
    """Two tensors in a file each."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_file({"a": torch.arange(1000)}, path / "model-1.safetensors")
    save_file({"b": torch.arange(2000)}, path / "model-2.safetensors")
    return path


def test_vllm_finds_the_format_by_the_entry_point():
    loader = get_model_loader(LoadConfig(load_format="hoistway"))
    assert isinstance(loader, DefaultModelLoader)
    assert type(loader).__module__ == "hoistway.plugins._vllm_loader"


def test_registering_again_changes_nothing():
    from hoistway.plugins.vllm import register  # noqa: PLC0415

    loader = type(get_model_loader(LoadConfig(load_format="hoistway")))
    with logged("vllm.model_executor.model_loader") as lines:
        register()
    assert lines == []
    assert type(get_model_loader(LoadConfig(load_format="hoistway"))) is loader


def test_a_real_model_gets_the_same_parameters_as_from_vllms_own_loader(llama, tmp_path):
    expected = load_llama(llama, "auto", store=tmp_path / "auto")
    with logged(LOG) as lines:
        found = load_llama(llama, "hoistway", store=tmp_path / "hoistway")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert lines[0].startswith("hoistway: 21 tensors")


def test_a_real_model_comes_from_a_store(llama, tmp_path, serve):
    serve()
    expected = load_llama(llama, "auto", store=tmp_path / "auto")
    with logged(LOG) as lines:
        found = load_llama("s3://llama", "hoistway", store=tmp_path / "hoistway")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert lines[0].startswith("hoistway: 21 tensors")
    assert "; http buffered 100%" in lines[0]
    (pulled,) = (tmp_path / "assets").glob("**/config.json")
    assert not list(pulled.parent.glob("*.safetensors"))


@pytest.mark.parametrize("llama", ["shards"], indirect=True)
def test_ranks_of_a_tensor_parallel_model_read_each_byte_once(llama, tmp_path):
    def work(rank):
        expected = load_llama(llama, "auto", rank=rank, ranks=2, store=tmp_path / "auto")
        with logged(LOG) as lines:
            found = load_llama(
                llama,
                "hoistway",
                rank=rank,
                ranks=2,
                store=tmp_path / "hoistway",
                strategy="share",
                timeout=60,
            )
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        return lines

    (first,), (second,) = on_ranks(2, work)
    assert first.startswith("hoistway, rank 0 of 2: 21 tensors, ")
    assert second.startswith("hoistway, rank 1 of 2: 21 tensors, ")
    (wanted, read), (_, also_read) = shared_kib(first), shared_kib(second)
    # Between them they read the files once, with their headers.
    assert min(read, also_read) > wanted / 4
    assert read + also_read < 1.1 * wanted


@pytest.mark.parametrize("llama", ["shards"], indirect=True)
def test_ranks_read_each_byte_of_a_store_once(llama, tmp_path, serve):
    serve()
    ModelConfig(model="s3://llama", skip_tokenizer_init=True)

    def work(rank):
        expected = load_llama(llama, "auto", rank=rank, ranks=2, store=tmp_path / "auto")
        with logged(LOG) as lines:
            found = load_llama(
                "s3://llama",
                "hoistway",
                rank=rank,
                ranks=2,
                store=tmp_path / "hoistway",
                strategy="share",
                timeout=60,
            )
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        return lines

    (first,), (second,) = on_ranks(2, work)
    (wanted, read), (_, also_read) = shared_kib(first), shared_kib(second)
    assert min(read, also_read) > wanted / 4
    assert read + also_read < 1.1 * wanted


def test_options_reach_hoistway_and_vllms_own_key_stays_vllms(checkpoint):
    extra = {"route": "threads", "direct": "never", "enable_weights_track": False}
    model = Module()
    lines = load(checkpoint, model, model_loader_extra_config=extra)
    assert torch.equal(model.given["b"], torch.arange(2000))
    assert "; threads buffered 100%" in lines[0]


@pytest.mark.parametrize("key", ["rout", "enable_multithread_load"])
def test_an_unknown_key_is_an_error_that_lists_the_known(key):
    with pytest.raises(
        OptionError, match=rf"cannot have '{key}': its keys are .*enable_weights_track.*route"
    ):
        get_model_loader(LoadConfig(load_format="hoistway", model_loader_extra_config={key: True}))


def test_a_strategy_of_vllms_own_reading_is_not_ignored(checkpoint):
    with pytest.raises(OptionError, match="safetensors_load_strategy cannot be 'eager'"):
        load(checkpoint, Module(), safetensors_load_strategy="eager")


def test_files_that_the_index_does_not_name_are_left_out(checkpoint):
    index = {"metadata": {}, "weight_map": {"b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    model = Module()
    load(checkpoint, model)
    assert list(model.given) == ["b"]


def test_secondary_weights_come_with_their_prefix(checkpoint):
    (checkpoint / "vision").mkdir()
    save_file({"a": torch.ones(3)}, checkpoint / "vision" / "model.safetensors")
    source = DefaultModelLoader.Source(str(checkpoint), None, subfolder="vision", prefix="vision.")
    model = Module(secondary_weights=[source])
    assert len(load(checkpoint, model)) == 2
    assert list(model.given) == ["a", "b", "vision.a"]


@unused_weights
def test_weights_that_the_model_does_not_use_are_not_read(checkpoint):
    model = Module(is_unused_checkpoint_weight=lambda name: name == "b")
    lines = load(checkpoint, model)
    assert list(model.given) == ["a"]
    assert lines[0].startswith("hoistway: 1 tensor, 7.8 KiB")


@encoder_only
def test_of_a_model_with_two_halves_the_encoder_is_read_alone(tmp_path):
    save_file({"language_model.a": torch.ones(9)}, tmp_path / "model-1.safetensors")
    save_file({"vision.b": torch.ones(9)}, tmp_path / "model-2.safetensors")
    parts = {"language_model.a": "model-1.safetensors", "vision.b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    model = Module(_language_model_names=["language_model"])
    multimodal = SimpleNamespace(mm_encoder_only=True)
    load(tmp_path, model, config=model_config(tmp_path, multimodal_config=multimodal))
    assert list(model.given) == ["vision.b"]


def test_experts_of_other_ranks_are_not_read(tmp_path, monkeypatch):
    weights = {
        f"layers.0.mlp.experts.{expert}.up_proj.{kind}": torch.full((size,), expert, dtype=torch.float32)
        for expert in range(8)
        for kind, size in (("weight", 4096), ("weight_scale", 1))
    }
    save_file({**weights, "norm": torch.ones(7)}, tmp_path / "model.safetensors")
    parallel = ParallelConfig(enable_expert_parallel=True, enable_ep_weight_filter=True)
    parallel.tensor_parallel_size = 4
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 1)
    model = Module()
    lines = load(
        tmp_path,
        model,
        config=model_config(tmp_path, is_moe=True, get_num_experts=lambda: 8),
        parallel=parallel,
    )
    experts = {int(name.split(".")[4]) for name in model.given if name.endswith(".weight")}
    assert experts == {2, 3}
    # Scales are wanted of all experts.
    assert len(model.given) == 2 + 8 + 1
    assert lines[0].startswith("hoistway: 11 tensors, 32.1 KiB")


def stored(folder, pulled, **changes):
    """The configuration of a model in a store, as vLLM makes it."""
    return model_config(pulled, model_weights=f"s3://{folder}", **changes)


def test_of_a_model_in_a_store_the_rest_lies_beside_it(checkpoint, serve):
    (checkpoint / "vision").mkdir()
    save_file({"c": torch.ones(3)}, checkpoint / "vision" / "model.safetensors")
    save_file({"d": torch.ones(4)}, checkpoint / "head.safetensors")
    index = {"weight_map": {"b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    sources = [
        DefaultModelLoader.Source("pulled", None, subfolder="vision", prefix="vision."),
        DefaultModelLoader.Source("pulled", None, allow_patterns_overrides=["head.safetensors"]),
    ]
    serve()
    model = Module(secondary_weights=sources)
    load("pulled", model, config=stored("checkpoint", "pulled"))
    assert list(model.given) == ["b", "vision.c", "d"]
    sources[1].allow_patterns_overrides = ["head*"]
    with pytest.raises(OptionError, match=r"s3://checkpoint/ are chosen by patterns, head\*"):
        load("pulled", model, config=stored("checkpoint", "pulled"))


def test_a_model_is_reloaded_from_another_url(checkpoint, tmp_path, serve):
    shutil.copytree(checkpoint, tmp_path / "newer")
    save_file({"a": torch.zeros(1000)}, tmp_path / "newer" / "model-1.safetensors")
    serve()
    model = Module()
    # As vLLM does it: the URL takes the place of the folder.
    load("s3://newer", model)
    assert torch.equal(model.given["a"], torch.zeros(1000))


@encoder_only
def test_of_a_model_in_a_store_the_encoder_is_read_alone(tmp_path, serve):
    halves, pulled = tmp_path / "halves", tmp_path / "pulled"
    halves.mkdir()
    pulled.mkdir()
    save_file({"language_model.a": torch.ones(9)}, halves / "model-1.safetensors")
    save_file({"vision.b": torch.ones(9)}, halves / "model-2.safetensors")
    parts = {"language_model.a": "model-1.safetensors", "vision.b": "model-2.safetensors"}
    for folder in (halves, pulled):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    serve()
    model = Module(_language_model_names=["language_model"])
    multimodal = SimpleNamespace(mm_encoder_only=True)
    load(pulled, model, config=stored("halves", pulled, multimodal_config=multimodal))
    assert list(model.given) == ["vision.b"]


def test_errors_of_a_store_name_the_url(tmp_path, serve):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    serve()
    with pytest.raises(FileNotFoundError, match="s3://none/"):
        load("pulled", Module(), config=stored("none", "pulled"))
    with pytest.raises(FormatError, match=r"s3://models/model\.gguf is GGUF"):
        load("pulled", Module(), config=stored("models", "pulled"))


def test_a_repository_is_looked_up_where_vllm_downloads_it_to(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "downloads" / "models--org--name"
    shutil.copytree(checkpoint, repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text("0123abc")
    model = Module()
    load(
        "org/name",
        model,
        config=model_config("org/name", revision="v2"),
        download_dir=str(tmp_path / "downloads"),
    )
    assert list(model.given) == ["a", "b"]


def test_a_shard_that_was_cut_short_fails_the_load(checkpoint):
    shard = checkpoint / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(TruncatedError) as error:
        load(checkpoint, Module())
    assert (str(error.value.path), error.value.tensor) == (str(shard), "b")


def test_other_formats_are_errors_that_say_what_to_use(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="no safetensors files: load it with --load-format auto"):
        load(tmp_path, Module())
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match="install vllm-gguf-plugin"):
        load(tmp_path / "model.gguf", Module())
