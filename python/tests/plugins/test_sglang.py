"""SGLang's own loaders, hooks and models, with hoistway reading the weights."""

from __future__ import annotations

import json
import os
import shutil
import sys
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

import_host("sglang.srt.model_loader.loader")

import sglang.srt.plugins  # noqa: E402
from hoistway.errors import FormatError, OptionError, TruncatedError  # noqa: E402
from hoistway.plugins.sglang import HOOKED, HoistwayModelLoader, register  # noqa: E402
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES  # noqa: E402
from sglang.srt.arg_groups.model_path_hook import handle_load_format  # noqa: E402
from sglang.srt.arg_groups.overrides import resolving_view  # noqa: E402
from sglang.srt.arg_groups.resolution_hooks import run_hook  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import (  # noqa: E402
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.model_loader import get_model_loader  # noqa: E402
from sglang.srt.model_loader.loader import DefaultModelLoader  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_context, get_model, get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils.runai_utils import ObjectStorageModel  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

pytestmark = HOST_WARNINGS
LOG = "hoistway.plugins.sglang"


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    """The plug-in, found and called by SGLang as in an installation."""
    with pytest.MonkeyPatch.context() as patch:
        site = tmp_path_factory.mktemp("site")
        install(site)
        patch.syspath_prepend(site)
        sglang.srt.plugins.load_plugins()
        with get_context().override_server_args(device="cpu"):
            yield


@pytest.fixture(params=["one file", "shards"])
def gpt2(request, tmp_path):
    """A small GPT-2, as transformers saves it: of a kind that SGLang builds without compiled kernels."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["GPT2LMHeadModel"],
    )
    GPT2LMHeadModel(config).save_pretrained(
        tmp_path / "gpt2", max_shard_size="100KB" if request.param == "shards" else "1GB"
    )
    return tmp_path / "gpt2"


def load_gpt2(path, load_format, store):
    """The parameters that SGLang's model has after `load_model`."""
    loader = get_model_loader(LoadConfig(load_format=load_format))
    with ExitStack() as stack:
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        stack.callback(destroy_distributed_environment)
        stack.enter_context(get_parallel().override(tp_rank=0, attn_tp_rank=0, moe_tp_rank=0, pp_rank=0))
        initialize_model_parallel()
        stack.callback(destroy_model_parallel)
        config = ModelConfig(str(path), dtype="float32")
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts a store that has the folders of the directory as buckets.

    Gives what SGLang does with a URL when a server starts, by Run:ai's package: it fetches what is not weights.
    """
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    with ExitStack() as stack:

        def serve():
            pull = stack.enter_context(in_store(tmp_path))

            def fetch(url):
                os.makedirs(ObjectStorageModel.get_path(url))
                pull(url, ObjectStorageModel.get_path(url), ignore=["*.safetensors"])

            return fetch

        yield serve


@pytest.fixture
def checkpoint(tmp_path):
    """Two tensors in a file each."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_file({"a": torch.arange(1000)}, path / "model-1.safetensors")
    save_file({"b": torch.arange(2000)}, path / "model-2.safetensors")
    return path


class Module(torch.nn.Module):
    """A model that takes what it is given."""

    def __init__(self, **attributes):
        super().__init__()
        self.given = {}
        for name, value in attributes.items():
            setattr(self, name, value)

    def load_weights(self, weights):
        self.given.update(weights)


def load(path, model, *, url=None, **settings):
    """Loads with SGLang's loader for the format, and returns the lines of the log."""
    loader = get_model_loader(LoadConfig(load_format="hoistway", **settings))
    config = SimpleNamespace(
        model_path=str(path), revision=None, hf_config=SimpleNamespace(architectures=["Some"])
    )
    if url is not None:
        config.model_weights = url
    with logged(LOG) as lines:
        weights = loader._get_all_weights(config, model)
        loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
    return lines


def test_sglang_finds_the_format_by_the_entry_point():
    loader = get_model_loader(LoadConfig(load_format="hoistway"))
    assert isinstance(loader, DefaultModelLoader)
    assert type(loader) is HoistwayModelLoader
    assert LOAD_FORMAT_CHOICES.count("hoistway") == 1


def test_registering_again_changes_nothing():
    register()
    assert LOAD_FORMAT_CHOICES.count("hoistway") == 1
    assert len(HookRegistry._hooks[HOOKED]) == 1


def test_the_class_itself_is_a_format():
    assert type(get_model_loader(LoadConfig(load_format=HoistwayModelLoader))) is HoistwayModelLoader


def test_other_formats_are_what_they_were():
    assert type(get_model_loader(LoadConfig(load_format="safetensors"))) is DefaultModelLoader
    with pytest.raises(ValueError, match="'none of these'"):
        LoadConfig(load_format="none of these")


def test_a_real_model_gets_the_same_parameters_as_from_sglangs_own_loader(gpt2, tmp_path):
    expected = load_gpt2(gpt2, "auto", tmp_path / "auto")
    with logged(LOG) as lines:
        found = load_gpt2(gpt2, "hoistway", tmp_path / "hoistway")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert lines[0].startswith("hoistway: 28 tensors")


def test_a_real_model_comes_from_a_store(gpt2, tmp_path, serve):
    fetch = serve()
    expected = load_gpt2(gpt2, "auto", tmp_path / "auto")
    fetch("s3://gpt2")
    with logged(LOG) as lines:
        found = load_gpt2("s3://gpt2", "hoistway", tmp_path / "hoistway")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert lines[0].startswith("hoistway: 28 tensors")
    assert "; http buffered 100%" in lines[0]


@pytest.mark.parametrize("load_format", ["hoistway", HoistwayModelLoader, "auto"])
def test_a_url_keeps_the_format_that_was_chosen(load_format):
    arguments = ServerArgs(model_path="s3://models/gpt2", load_format=load_format)
    run_hook(handle_load_format, arguments)
    expected = "runai_streamer" if load_format == "auto" else load_format
    assert resolving_view(arguments).load_format == expected


def test_weights_are_updated_from_another_place(checkpoint, tmp_path, serve):
    shutil.copytree(checkpoint, tmp_path / "newer")
    save_file({"a": torch.zeros(1000)}, tmp_path / "newer" / "model-1.safetensors")
    serve()
    first, second, third = Module(), Module(), Module()
    load(ObjectStorageModel.get_path("s3://checkpoint"), first, url="s3://checkpoint")
    # SGLang changes the path, and leaves the URL as it was.
    load("s3://newer", second, url="s3://checkpoint")
    load(tmp_path / "newer", third, url="s3://checkpoint")
    assert torch.equal(first.given["a"], torch.arange(1000))
    assert torch.equal(second.given["a"], torch.zeros(1000))
    assert torch.equal(third.given["a"], torch.zeros(1000))


def test_what_cannot_be_had_from_a_store_is_an_error_that_names_the_url(checkpoint, serve):
    serve()
    with pytest.raises(FileNotFoundError, match="s3://none/"):
        load("s3://none", Module())
    with pytest.raises(OptionError, match=r"s3://checkpoint/ are chosen by patterns, a\*, b\*"):
        load("s3://checkpoint", Module(allow_patterns_overrides=["a*", "b*"]))


def test_ranks_read_each_byte_once(checkpoint, tmp_path):
    def work(rank):
        init_distributed_environment(2, rank, f"file://{tmp_path / 'store'}", rank, backend="gloo")
        model = Module()
        (line,) = load(checkpoint, model, model_loader_extra_config={"strategy": "share", "timeout": 60})
        assert torch.equal(model.given["a"], torch.arange(1000))
        assert torch.equal(model.given["b"], torch.arange(2000))
        return line

    first, second = on_ranks(2, work)
    assert first.startswith("hoistway, rank 0 of 2: 2 tensors, 23.4 KiB to cpu in ")
    assert second.startswith("hoistway, rank 1 of 2: 2 tensors, 23.4 KiB to cpu in ")
    (wanted, read), (_, also_read) = shared_kib(first), shared_kib(second)
    # A file each, with its header.
    assert min(read, also_read) > wanted / 4
    assert read + also_read < wanted + 1


def test_ranks_read_a_store_together(checkpoint, tmp_path, serve):
    serve()

    def work(rank):
        init_distributed_environment(2, rank, f"file://{tmp_path / 'store'}", rank, backend="gloo")
        model = Module()
        (line,) = load(
            "s3://checkpoint", model, model_loader_extra_config={"strategy": "share", "timeout": 60}
        )
        assert torch.equal(model.given["a"], torch.arange(1000))
        assert torch.equal(model.given["b"], torch.arange(2000))
        return line

    first, second = on_ranks(2, work)
    assert first.startswith("hoistway, rank 0 of 2: 2 tensors, 23.4 KiB to cpu in ")
    (wanted, read), (_, also_read) = shared_kib(first), shared_kib(second)
    assert min(read, also_read) > wanted / 4
    assert read + also_read < wanted + 1


@pytest.mark.parametrize("written", [dict, json.dumps], ids=["dictionary", "text"])
def test_options_reach_hoistway(checkpoint, written):
    model = Module()
    extra = written({"route": "threads", "direct": "never"})
    lines = load(checkpoint, model, model_loader_extra_config=extra)
    assert torch.equal(model.given["b"], torch.arange(2000))
    assert "; threads buffered 100%" in lines[0]


def test_ranks_of_a_pipeline_read_together_only_if_sglang_says_so(monkeypatch):
    every, stage = (SimpleNamespace(world_size=2, cpu_group=name) for name in ("every", "stage"))
    parallel = SimpleNamespace(pp_size=2, tp_group=stage, world_group=every)
    monkeypatch.setattr(sys.modules[HoistwayModelLoader.__module__], "get_parallel", lambda: parallel)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def group(**extra):
        config = LoadConfig(load_format="hoistway", model_loader_extra_config=extra)
        return get_model_loader(config)._group("cpu")

    # SGLang before 0.5.22 has no load_group: a stage's draft model would wait for ranks that do not load it.
    assert group() == (None if host_is_before("sglang", "0.5.22") else "every")
    assert group(share="world") == "every"
    assert group(share="tp") == "stage"
    assert group(share="none") is None


def test_an_unknown_key_is_an_error_that_lists_the_known():
    with pytest.raises(OptionError, match=r"cannot have 'num_threads': its keys are .*max_in_flight.*route"):
        get_model_loader(LoadConfig(load_format="hoistway", model_loader_extra_config={"num_threads": 8}))


def test_a_way_of_sglangs_own_reading_is_not_ignored(checkpoint):
    with (
        get_model().override(weight_loader_prefetch_checkpoints=True),
        pytest.raises(OptionError, match="weight_loader_prefetch_checkpoints"),
    ):
        load(checkpoint, Module())


def test_files_that_the_index_does_not_name_are_left_out(checkpoint):
    index = {"metadata": {}, "weight_map": {"b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    model = Module()
    load(checkpoint, model)
    assert list(model.given) == ["b"]


def test_secondary_weights_come_with_their_prefix(checkpoint, tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    source = DefaultModelLoader.Source(str(tmp_path), None, prefix="vision.")
    model = Module(secondary_weights=[source])
    assert len(load(checkpoint, model)) == 2
    assert list(model.given) == ["a", "b", "vision.a"]


def test_a_draft_model_reads_its_own_layer_only(tmp_path):
    weights = {
        f"model.mtp.layers.{layer}.w": torch.full((1024,), layer, dtype=torch.float32) for layer in range(4)
    }
    save_file({**weights, "norm": torch.ones(1024)}, tmp_path / "model.safetensors")
    model = Module()
    lines = load(tmp_path, model, draft_model_idx=2)
    assert set(model.given) == {"model.mtp.layers.0.w", "norm"}
    assert (model.given["model.mtp.layers.0.w"] == 2).all()
    assert lines[0].startswith("hoistway: 2 tensors, 8.0 KiB")


def test_files_leave_the_page_cache_if_sglang_is_told_so(checkpoint, monkeypatch, serve):
    advised = []
    monkeypatch.setattr("os.posix_fadvise", lambda *call: advised.append(call[3]))
    serve()
    with get_model().override(weight_loader_drop_cache_after_load=True):
        load(checkpoint, Module())
        load("s3://checkpoint", Module())
    assert advised == [os.POSIX_FADV_DONTNEED] * 2


@pytest.mark.parametrize("change", [{"quantization": "modelopt_fp8"}, {"quantization": "auto-round-int8"}])
def test_a_model_that_has_to_be_quantised_first_is_an_error(checkpoint, change):
    config = SimpleNamespace(model_path=str(checkpoint), _is_already_quantized=lambda: False, **change)
    loader = get_model_loader(LoadConfig(load_format="hoistway"))
    with pytest.raises(OptionError, match="cannot quantise this model"):
        loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))


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
    with pytest.raises(FormatError, match="use load format gguf"):
        load(tmp_path / "model.gguf", Module())
