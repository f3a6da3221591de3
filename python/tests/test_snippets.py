"""The Python in the pages runs as it is printed there.

A block may need what the machine lacks. The stand-in driver takes the place of GPUs, objectd that of object stores,
usrbiod that of a 3FS, and addresses and sizes are replaced by those of the test. What nothing stands in for is skipped,
with the reason.
"""

from __future__ import annotations

import os
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import prometheus_client
import pytest
import torch
import transformers
from conftest import Daemon, StandIn, serving, write_model
from hoistway import _frameworks

sys.path.append(str(Path(__file__).parents[2] / "testkit" / "snippets"))

import snippets

Replacements = dict[str, str]
"""What stands for a text of a page in the test."""

NOT_RUN = {
    "ranks with GPUs": "ranks exchange tensors of devices by NCCL, which needs real ones",
    "runai-model-streamer": "that library is not among the packages of the tests",
    "InstantTensor": "that library needs CUDA's own",
}
"""Needs that nothing stands in for, and why."""

STANDS_IN = {
    "a GPU": "gpu",
    "a 3FS": "threefs",
    "a port": "port",
    "an object store": "object_stores",
    "object stores": "object_stores",
    "the drives that it names": "drives",
    "fastsafetensors": "fastsafetensors",
}
"""The fixture for each other need."""


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
    write_model(folder / "model-00002-of-00002.safetensors", {"model.norm.weight": ("F32", [8])})
    write_gguf(folder / "model-Q4_K_M.gguf")
    return folder


@pytest.fixture(scope="module")
def every_page() -> str:
    """The code of all pages."""
    return "".join(snippets.module(page) for page in snippets.pages())


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


@pytest.fixture
def gpu(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Replacements:
    """Devices of the stand-in driver. Torch cannot use their memory: it gets copies on the host."""

    def to_torch(
        tensors: list[Any], dlpack: Any, types: dict[str, Any], is_lender: bool, into: dict[str, Any]
    ) -> None:
        theirs([tensor for tensor in tensors if tensor.device == "cpu"], dlpack, types, is_lender, into)
        for tensor in tensors:
            if tensor.device != "cpu":
                content = torch.frombuffer(bytearray(tensor.tobytes()), dtype=torch.uint8)
                into[tensor.name] = content.view(types[tensor.dtype]).view(tensor.shape)

    theirs = _frameworks._native.to_torch
    monkeypatch.setattr(_frameworks._native, "to_torch", to_torch)
    monkeypatch.setattr("hoistway._checkpoint.torch_allocator", lambda _device: stand_in.lend)
    return {}


@pytest.fixture
def threefs(gpu: Replacements, daemon: Daemon, folder: Path) -> Replacements:
    """A mount of the stand-in for the daemon of a 3FS, with a model."""
    shutil.copytree(folder / "models/llama", daemon.root / "models/llama")
    return gpu | {"/mnt/3fs": str(daemon.mount)}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Replacements]:
    """A server of metrics on a free port, which is asked for them at the end."""
    registry = prometheus_client.CollectorRegistry()
    started = []
    failed_before = request.session.testsfailed

    def start(port: int) -> None:
        assert port == 8000
        started.append(start_http_server(0, "127.0.0.1", registry))

    start_http_server = prometheus_client.start_http_server
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.setattr(prometheus_client, "start_http_server", start)
    yield {}
    assert started or request.session.testsfailed > failed_before, "the page starts no server"
    for server, thread in started:
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as answer:
                assert b"hoistway_loads_total" in answer.read()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[str, str]]:
    """A store that has the folder of models as its bucket, and a hub that has one of them."""
    with (
        serving(folder / "models", "models/") as store,
        serving(folder / "models/llama", "", "0", "hub") as hub,
    ):
        yield store, hub


@pytest.fixture
def object_stores(
    gpu: Replacements, servers: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Replacements:
    """Stores on this machine, which the environment names where a block does not."""
    store, hub = servers
    # Those of the machine would name other stores, keys and caches. Other tests' packages set some, for the process.
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_")) or name == "HOISTWAY_CACHE":
            monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": store,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HF_ENDPOINT": hub,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        # However full the drive is.
        "HOISTWAY_CACHE_BYTES": "1GiB",
    }.items():
        monkeypatch.setenv(name, value)
    return gpu | {
        "https://storage.example:9000": store,
        "http://storage:9000": store,
        "https://example.org": f"{store}/models",
        "hf://Qwen/Qwen3-0.6B": "hf://org/model",
        "/nvme/hoistway": str(tmp_path / "cache"),
    }


@pytest.fixture
def drives(tmp_path: Path) -> Replacements:
    """Directories in place of drives, and capacities that any drive has."""
    (tmp_path / "shared").mkdir()
    return {
        "/mnt/shared/kv": str(tmp_path / "shared"),
        "/mnt/nvme/kv": str(tmp_path / "near"),
        "20TiB": "256MiB",
        "500GiB": "256MiB",
    }


@pytest.fixture
def fastsafetensors() -> Replacements:
    """That library, which knows no device here but the host."""
    pytest.importorskip("fastsafetensors")
    return {'None, "cuda:0"': 'None, "cpu"'}


def place(need: snippets.Need) -> str:
    """Where a block is."""
    return f"{need.page.relative_to(snippets.ROOT)}:{need.line}"


@pytest.mark.parametrize("page", snippets.pages(), ids=lambda page: str(page.relative_to(snippets.ROOT)))
def test_the_python_of_a_page_runs(
    page: Path,
    folder: Path,
    every_page: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(folder)
    lacks, reasons, replacements = set(NOT_RUN), [], {}
    wanted = dict.fromkeys(need.what for need in snippets.needs() if need.page == page)
    for need in (need for need in wanted if need not in NOT_RUN):
        try:
            replacements |= request.getfixturevalue(STANDS_IN[need])
        except pytest.skip.Exception as reason:
            lacks.add(need)
            reasons.append(reason)
    code = snippets.module(page, lacks=lacks)
    for shown, instead in replacements.items():
        assert shown in every_page, f"no page has {shown!r} any more, for which {instead!r} stands"
        code = code.replace(shown, instead)
    for name in ("fastsafetensors", "fastsafetensor_3fs_reader"):
        # Put back, as pages replace them.
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    try:
        exec(compile(code, page, "exec"), {"__name__": "snippet"})
    finally:
        if drop_in := sys.modules.get("hoistway.compat.safetensors"):
            drop_in.uninstall()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    for reason in reasons:
        raise reason


@pytest.mark.parametrize("need", [need for need in snippets.needs() if need.what in NOT_RUN], ids=place)
def test_what_does_not_run_is_listed(need: snippets.Need) -> None:
    pytest.skip(f"{place(need)} needs {need.what}: {NOT_RUN[need.what]}")
