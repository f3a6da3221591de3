"""What loaders make of a store that fails: `python bench/object_faults.py --output bench/results`.

A server of this repository (testkit/objectd) has one safetensors file, and answers one request wrongly, or each
one. Only requests for the first byte of the file are spared. Each load is a new process, whose tensors are compared
with the file: they are right or wrong, or the loader raises an error, or it has not ended after `--patience` seconds
and is killed. It needs `cargo build --package objectd`, and for the peers runai-model-streamer-s3 and s3torchconnector.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from host import machine

ROOT = Path(__file__).parents[1]
BUCKET = "models"
NAME = "model.safetensors"
TENSORS = 24
TENSOR_BYTES = 2 << 20

FAULTS = {
    "none": "none",
    "truncate": "the connection ends inside the body",
    "short": "206 with a shorter range than asked for, and a head that says so",
    "shift": "206 with a range that is a byte early, and a head that says so",
    "whole": "200 with the whole file",
    "swap": "from now on another file of the same length and another ETag",
    "flip": "one bit of the body is another",
    "503": "503 Slow Down",
    "429": "429 Too Many Requests",
    "stall": "no answer for ten minutes",
}
# Of the requests that may fail.
ONE = "3"


def _hoistway(endpoint: str) -> dict[str, Any]:
    import hoistway  # noqa: PLC0415

    return dict(hoistway.load_file(f"s3://{BUCKET}/{NAME}", store={"endpoint": endpoint}).items())


def _runai(endpoint: str) -> dict[str, Any]:
    del endpoint
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([f"s3://{BUCKET}/{NAME}"])
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def _s3torch(endpoint: str) -> dict[str, Any]:
    from s3torchconnector import S3Checkpoint, S3ClientConfig  # noqa: PLC0415
    from safetensors.torch import load  # noqa: PLC0415

    config = S3ClientConfig(force_path_style=True)
    checkpoint = S3Checkpoint(region="us-east-1", endpoint=endpoint, s3client_config=config)
    with checkpoint.reader(f"s3://{BUCKET}/{NAME}") as reader:
        return dict(load(reader.read()))


LOADERS = {
    "hoistway": ("hoistway", _hoistway),
    "runai-model-streamer": ("runai_model_streamer_s3", _runai),
    "s3torchconnector": ("s3torchconnector", _s3torch),
}


def write(path: Path) -> None:
    """Writes the file."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    made = torch.Generator().manual_seed(5)
    save_file(
        {
            f"tensor.{number}": torch.randint(0, 256, (TENSOR_BYTES,), dtype=torch.uint8, generator=made)
            for number in range(TENSORS)
        },
        path,
    )


def load_once(loader: str, endpoint: str, path: Path, told: Connection) -> None:
    """Loads, and says what came of it."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
        RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0",
    )
    begun = time.monotonic()
    try:
        found = LOADERS[loader][1](endpoint)
    except Exception as error:
        outcome = {"outcome": "error", "said": f"{type(error).__name__}: {error}"[:300]}
    else:
        expected = load_file(path)
        differ = [
            name for name in expected if name not in found or not torch.equal(found[name], expected[name])
        ]
        outcome = {"outcome": "wrong bytes" if differ else "right bytes", "tensors": len(differ)}
    told.send(outcome | {"seconds": round(time.monotonic() - begun, 1)})


def run(loader: str, fault: str, request: str, path: Path, patience: float) -> dict[str, Any]:
    """One load from a new server, in a process of its own that has imported everything already."""
    server = subprocess.Popen(
        [ROOT / "target/debug/objectd", path.parent, f"{BUCKET}/", "0", "s3", "0", fault, request, "none"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    endpoint = server.stdout.readline().strip()
    context = multiprocessing.get_context("fork")
    told, tells = context.Pipe(duplex=False)
    process = context.Process(target=load_once, args=(loader, endpoint, path, tells))
    process.start()
    tells.close()
    found: dict[str, Any] = {"outcome": "no end"}
    if told.poll(patience):
        try:
            found = told.recv()
        except EOFError:
            found = {"outcome": "crash"}
    process.kill()
    process.join()
    server.kill()
    server.wait()
    return found


def shown(found: dict[str, Any], patience: float) -> str:
    """One cell of the table."""
    if found["outcome"] == "no end":
        return f"**no end in {patience:.0f} s**"
    if found["outcome"] == "wrong bytes":
        return "**wrong bytes, no error**"
    return f"{found['outcome']} ({found['seconds']:.0f} s)"


def document(results: dict[str, Any]) -> str:
    """Tells the results as a page."""
    host, loads, patience = results["host"], results["loads"], results["patience"]
    packages = ", ".join(f"{name} {version}" for name, version in host["packages"].items())
    text = (
        "# Loads from an object store that fails\n\n"
        f"A safetensors file of {TENSORS * TENSOR_BYTES / 1e6:.0f} MB over HTTP, from a server on the same machine "
        f"that answers one request wrongly (number {ONE} of those that may fail), or each one; requests for the first "
        "byte of the file are spared. The server has ETags and no checksums. Each load is a new process, "
        f"killed after {patience:.0f} s. Seconds compare no speeds: hoistway is built for tests. {packages}; "
        f"{host['cores']} cores of {host['processor']}, Linux "
        f"{host['kernel']}, {host['date']}, commit {host['commit']}. Made by `bench/object_faults.py`.\n"
    )
    for title, request in [("One request fails", ONE), ("Each request fails", "each")]:
        text += f"\n## {title}\n| fault | " + " | ".join(loads) + " |\n|---" * 1 + "|---" * len(loads) + "|\n"
        for fault, told in FAULTS.items():
            cells = [shown(runs[f"{fault} {request}"], patience) for runs in loads.values()]
            text += f"| {told} | " + " | ".join(cells) + " |\n"
    return text


def main() -> None:
    """Loads with each fault, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patience", type=float, default=90, help="seconds after which a load is killed")
    parser.add_argument("--output", type=Path, help="directory for object-faults.json and object-faults.md")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    packages = ["hoistway"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / NAME
        write(path)
        for loader, (module, _) in LOADERS.items():
            if importlib.util.find_spec(module) is None:
                continue
            importlib.import_module(module)
            packages += [loader] if loader != "hoistway" else []
            found[loader] = {}
            for fault in FAULTS:
                for request in (ONE, "each"):
                    outcome = run(loader, fault, request, path, arguments.patience)
                    found[loader][f"{fault} {request}"] = outcome
                    print(loader, fault, request, outcome, file=sys.stderr, flush=True)
        results = {"host": machine(path, tuple(packages)), "patience": arguments.patience, "loads": found}
    text = document(results)
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "object-faults.json").write_text(json.dumps(results, indent=1) + "\n")
        (arguments.output / "object-faults.md").write_text(text)


if __name__ == "__main__":
    main()
