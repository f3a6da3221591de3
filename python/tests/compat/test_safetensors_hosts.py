"""transformers, accelerate and diffusers load and save their own models through the installed drop-in, unchanged."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import hoistway.compat.safetensors as drop_in
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def imported(name: str) -> ModuleType:
    """A package that warns about many things on the way in. One that is broken fails the test."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    package = imported("transformers")
    imported("transformers.modeling_utils")
    package.utils.logging.disable_progress_bar()
    package.utils.logging.set_verbosity_error()
    return package


@pytest.fixture
def installed() -> Iterator[drop_in.Installation]:
    with drop_in.install() as installation:
        yield installation


@pytest.fixture(scope="module")
def as_saved(transformers: ModuleType) -> dict[str, str]:
    """The argument of `from_pretrained` that keeps the element types of the file."""
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    return {"dtype" if version >= (4, 56) else "torch_dtype": "auto"}


def models(transformers: ModuleType) -> list[torch.nn.Module]:
    """Small models of real architectures: grouped attention, and tied embeddings with biases."""
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=503,
    )  # fmt: skip
    bert = transformers.BertConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3, vocab_size=311
    )
    return [transformers.LlamaForCausalLM(llama).to(torch.bfloat16), transformers.BertForMaskedLM(bert)]


def assert_same(loaded: torch.nn.Module, model: torch.nn.Module) -> None:
    mine, theirs = loaded.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name], tensor), name


def carried(directory: Path) -> dict[str, int]:
    """Bytes of tensors that hoistway loaded from each file of a directory, since it was written."""
    return {
        Path(path).name: report.tensor_bytes
        for path, report in drop_in.reports()
        if Path(path).parent == directory
    }


def stored(directory: Path) -> dict[str, int]:
    """Bytes of tensors in each file of a directory."""
    return {
        file.name: file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
        for file in directory.glob("*.safetensors")
    }


@pytest.mark.parametrize("shards", ["one file", "several files"])
@pytest.mark.parametrize("writer", ["safetensors", "hoistway"])
@pytest.mark.parametrize("which", [0, 1], ids=["llama", "bert"])
def test_from_pretrained(
    tmp_path: Path,
    transformers: ModuleType,
    as_saved: dict[str, str],
    *,
    which: int,
    writer: str,
    shards: str,
) -> None:
    model = models(transformers)[which]
    size = "10GB" if shards == "one file" else "100KB"
    if writer == "safetensors":
        model.save_pretrained(tmp_path, max_shard_size=size)
    with drop_in.install() as installation:
        if writer == "hoistway":
            model.save_pretrained(tmp_path, max_shard_size=size)
        loaded = type(model).from_pretrained(tmp_path, **as_saved)
        assert installation.passed_on == []
    assert_same(loaded, model)
    assert carried(tmp_path) == stored(tmp_path)
    assert (len(stored(tmp_path)) > 1) == (shards == "several files")


def test_what_hoistway_saved_safetensors_loads(
    tmp_path: Path, transformers: ModuleType, as_saved: dict[str, str]
) -> None:
    model = models(transformers)[0]
    with drop_in.install():
        model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert_same(type(model).from_pretrained(tmp_path, **as_saved), model)
    assert carried(tmp_path) == {}


def test_from_bytes(
    tmp_path: Path, transformers: ModuleType, as_saved: dict[str, str], installed: Any
) -> None:
    if not hasattr(transformers.modeling_utils, "_safe_load_bytes"):
        pytest.skip("this version of transformers loads no model from bytes")
    model = models(transformers)[0]
    model.save_pretrained(tmp_path)
    assert transformers.modeling_utils._safe_load_bytes.__globals__["__name__"].startswith("hoistway.")
    assert_same(type(model).from_pretrained(tmp_path, **as_saved, disable_mmap=True), model)
    assert carried(tmp_path) == {}, "it was loaded from the file and not from its bytes"


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_accelerate(
    tmp_path: Path, transformers: ModuleType, installed: Any, device_map: dict[str, str] | None
) -> None:
    accelerate = imported("accelerate")
    model = models(transformers)[0]
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    empty = type(model)(model.config).to(torch.bfloat16)
    accelerate.load_checkpoint_in_model(empty, str(tmp_path), device_map=device_map)
    assert_same(empty, model)
    assert carried(tmp_path) == stored(tmp_path)


def test_accelerate_saves(tmp_path: Path, installed: Any) -> None:
    accelerate = imported("accelerate")
    layer = torch.nn.Linear(16, 16)
    accelerate.Accelerator(cpu=True).save_model(layer, tmp_path)
    state = imported("accelerate.utils").load_state_dict(str(tmp_path / "model.safetensors"))
    assert torch.equal(state["weight"], layer.weight)
    assert carried(tmp_path) == stored(tmp_path)


def test_diffusers(tmp_path: Path, installed: Any) -> None:
    if find_spec("diffusers") is not None:
        for requirement in map(Requirement, requires("diffusers") or []):
            # An environment of old hosts may have a hub that is too new for diffusers.
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if canonicalize_name(requirement.name) == "huggingface-hub" and applies:
                found = version("huggingface_hub")
                if not requirement.specifier.contains(found, prereleases=True):
                    pytest.skip(
                        f"the installed diffusers needs {requirement}, and the environment has {found}"
                    )
    diffusers = imported("diffusers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = diffusers.AutoencoderKL
        model = kind(block_out_channels=(8,), norm_num_groups=2, latent_channels=2)
        model.save_pretrained(tmp_path)
        loaded = kind.from_pretrained(tmp_path)
    assert_same(loaded, model)
    assert carried(tmp_path) == stored(tmp_path)
