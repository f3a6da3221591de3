"""What commands print with ``--json`` is what the schemas beside the documentation say."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hoistway
import pytest
from conftest import SMALL_STORE, serving, write_model

jsonschema = pytest.importorskip("jsonschema")

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = DOCS / "schemas"
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stores are for Linux")


def printed(*arguments: object, codes: tuple[int, ...] = (0,), **variables: str) -> Any:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "hoistway", *map(str, arguments), "--json"],
        capture_output=True,
        check=False,
        timeout=120,
        env=os.environ | variables,
    )
    assert done.returncode in codes, done.stderr
    return json.loads(done.stdout)


def samples(folder: Path) -> Iterator[tuple[str, Any]]:
    """Objects that commands print, each with the name of its schema."""
    model = write_model(folder / "model.safetensors", {"a": ("F32", [300, 300]), "b": ("U8", [5])})
    for route in ("threads", "mapped", "auto"):
        yield "load", printed("load", model, "--route", route)
    yield "load", printed("load", model, "--verify", "--direct", "never", "--numa", "0")
    yield "load", printed("load", model, "--device", "cuda:0")
    yield "inspect", printed("inspect", model)
    gguf = folder / "model.gguf"
    write_gguf(gguf)
    yield "inspect", printed("inspect", gguf)
    yield "inspect", printed("inspect", gguf, "--all")
    yield "verify", printed("verify", model)
    yield "warm", printed("warm", model)
    yield "doctor", printed("doctor", model)
    yield "doctor", printed("doctor", folder / "none", codes=(1,))
    yield from of_caches(folder)
    yield from of_stores(folder)
    moe = folder / "moe"
    moe.mkdir()
    experts = [
        (layer, expert, part) for layer in range(2) for expert in range(8) for part in ("gate", "up", "down")
    ]
    write_model(
        moe / "model.safetensors",
        {EXPERT.format(*expert): ("F32", [64, 64]) for expert in experts} | {"x": ("U8", [8])},
    )
    config = {"num_experts_per_tok": 2, "num_experts": 8, "num_hidden_layers": 2, "model_type": "qwen3_moe"}
    (moe / "config.json").write_text(json.dumps(config))
    trace = folder / "trace.csv"
    shape = [
        "--layers",
        2,
        "--experts",
        8,
        "--experts-per-token",
        2,
        "--tokens",
        30,
        "--expert-bytes",
        "48KiB",
    ]
    words = ["moe", "generate", "zipf", "--output", trace, *shape]
    subprocess.run([sys.executable, "-m", "hoistway", *map(str, words)], check=True, capture_output=True)
    yield "moe-plan", printed("moe", "plan", moe, "--memory", "1GiB")
    yield "moe-plan", printed("moe", "plan", moe, "--memory", "400KiB", "--trace", trace)
    yield "moe-pack", printed("moe", "pack", moe)
    yield "moe-pack", printed("moe", "pack", moe, "--check")
    yield "moe-plan", printed("moe", "plan", moe, "--memory", "1GiB")
    yield "moe-replay", printed("moe", "replay", trace, "--budget", "2c")
    yield "moe-replay", printed("moe", "replay", trace, "--budget", "2c", "--drive-rate", "1GB")
    short = ["--iterations", 1, "--warmup", 0]
    yield "bench-read", printed("bench", "read", model, *short, "--num-processes", 1, "--chunk-sizes", 1)
    yield "bench-headers", printed("bench", "headers", model, *short, "--batch-sizes", 1, "--num-threads", 1)


def write_gguf(path: Path) -> None:
    """A GGUF file with a key of each kind that is shown apart."""
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list([f"token {number}" for number in range(100)])
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_caches(folder: Path) -> Iterator[tuple[str, Any]]:
    served = folder / "served"
    (served / "models" / "llama").mkdir(parents=True)
    write_model(served / "models" / "llama" / "model.safetensors", {"a": ("F32", [1000, 300])})
    with serving(served) as endpoint:
        where = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        where |= {
            "AWS_REGION": "us-east-1",
            "HOISTWAY_CACHE": str(folder / "cache"),
            "HOISTWAY_CACHE_BYTES": "1GiB",
        }
        yield "cache-warm", printed("cache", "warm", "s3://models/llama/", **where)
        yield "load", printed("load", "s3://models/llama/", **where)
    for command in ("stat", "ls", "verify", "gc"):
        yield f"cache-{command}", printed("cache", command, **where)


def of_stores(folder: Path) -> Iterator[tuple[str, Any]]:
    root = folder / "kv"
    with hoistway.kv.Store(root, **SMALL_STORE) as store:
        blocks = store.namespace(model="llama@1", tensor_parallel=(0, 2))
        assert blocks.store([b"key"], [b"x" * 1000]).wait(30).ok
        assert blocks.store([b"timed"], [b"y" * 1000], ttl=3600).wait(30).ok
        yield "kv-stat", printed("kv", "stat", root)
        namespace = blocks.id
    yield "kv-stat", printed("kv", "stat", root)
    yield "kv-ls", printed("kv", "ls", root)
    yield "kv-ls", printed("kv", "ls", root, "--namespace", namespace)
    yield "kv-ls", printed("kv", "ls", root, "--namespace", namespace, "--long")
    yield "kv-verify", printed("kv", "verify", root)
    data = max(
        (path for path in root.rglob("*") if path.is_file()), key=lambda path: path.read_bytes().count(b"x")
    )
    content = data.read_bytes()
    data.write_bytes(content.replace(b"x" * 100, b"z" * 100, 1))
    yield "kv-verify", printed("kv", "verify", root, codes=(4,))
    yield "kv-gc", printed("kv", "gc", root)
    sizes = ["--bytes", "1MiB", "--block-sizes", "64KiB", "--iterations", 1]
    yield "kv-bench", printed("kv", "bench", folder, *sizes)


def strict(schema: Any) -> Any:
    """The schema, without leave for fields that it does not describe."""
    schema = copy.deepcopy(schema)

    def close(part: Any) -> None:
        if isinstance(part, dict):
            if "properties" in part:
                part.setdefault("additionalProperties", False)
            for value in part.values():
                close(value)
        elif isinstance(part, list):
            for value in part:
                close(value)

    close(schema)
    return schema


def test_each_command_prints_what_its_schema_says(tmp_path: Path) -> None:
    seen = set()
    for name, found in samples(tmp_path):
        schema = json.loads((SCHEMAS / f"{name}.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        assert next(iter(found)) == "format_version", name
        jsonschema.validate(found, strict(schema))
        seen.add(name)
    assert seen == {path.stem for path in SCHEMAS.glob("*.json")}


def test_each_command_with_json_has_a_schema() -> None:
    page = (DOCS / "options.md").read_text()
    sections = re.findall(r"^## `hoistway ([a-z -]+)`\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    commands = {name.replace(" ", "-") for name, text in sections if "`--json`" in text}
    assert commands == {path.stem for path in SCHEMAS.glob("*.json")}
    for name in commands:
        assert f"(schemas/{name}.json)" in page
