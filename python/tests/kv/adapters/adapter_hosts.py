"""What the tests of adapters share: examples of the documentation, and damage to the files of a store."""

from __future__ import annotations

import asyncio
import json
import mmap
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

# What plug-ins and the store have for their tests serves those of adapters.
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "plugins")]

from conftest import write_model
from plugin_hosts import ROOT

# Where the examples of the documentation have their stores.
DOCUMENTED_ROOT = "/mnt/nvme/kv"
# Small, so that segments are too; and nothing is asked of the drive that tests do not need.
SMALL = {"capacity": "64MiB", "min_free": 0, "durability": "none"}
# Those that no handler of `Exception` sees, and one that no handler of the store's errors does.
INTERRUPTS = [KeyboardInterrupt, SystemExit, asyncio.CancelledError, TypeError]


def examples(page: str, root: Path, language: str = "json") -> list[Any]:
    """The examples of a page of docs/kv, with their stores in a directory of the test's."""
    text = (ROOT / "docs" / "kv" / f"{page}.md").read_text()
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has no examples"
    # None of the capacity is taken in advance, but the examples' is more than what a drive for tests has.
    return [
        json.loads(re.sub(r'"\d+[TG]iB"', '"64MiB"', block.replace(DOCUMENTED_ROOT, str(root))))
        for block in blocks
    ]


def wait_until(is_so: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Waits for something, and returns it."""
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
    return found


def flip_bit(root: Path, content: bytes) -> None:
    """Changes a bit of the block that has this content."""
    for path, offset in _places(root, content):
        with path.open("r+b") as file:
            file.seek(offset + len(content) // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        return
    raise AssertionError("no file has the block")


def truncate(root: Path, content: bytes) -> None:
    """Cuts the file of the block that has this content, in the middle of the block."""
    for path, offset in _places(root, content):
        with path.open("r+b") as file:
            file.truncate(offset + len(content) // 2)
        return
    raise AssertionError("no file has the block")


def _places(root: Path, content: bytes) -> Iterator[tuple[Path, int]]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.stat().st_size >= len(content):
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                offset = data.find(content)
            if offset >= 0:
                yield path, offset


def exported_metrics(text: str, root: Path) -> dict[tuple[str, ...], float]:
    """The counters and gauges of a store in what Prometheus gets, without what says which process they are of."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "pid"}
            if sample.name.startswith("hoistway_kv_") and labels.pop("store", str(root)) == str(root):
                found[(sample.name, *sorted(labels.values()))] = sample.value
    return found


def assert_exported(exported: Any, store: Any) -> None:
    """Prometheus gets what the store counts and measures, but for histograms."""
    from prometheus_client import generate_latest  # noqa: PLC0415
    from prometheus_client.openmetrics.parser import text_string_to_metric_families  # noqa: PLC0415

    families = list(text_string_to_metric_families(store.metrics()))
    assert {"counter", "gauge", "histogram"} == {family.type for family in families}
    expected = {
        (
            sample.name,
            *sorted(value for name, value in sample.labels.items() if name != "store"),
        ): sample.value
        for family in families
        for sample in family.samples
        if family.type != "histogram" and not sample.name.endswith("_created")
    }
    exported.update()
    found = exported_metrics(generate_latest().decode(), Path(store.root))
    assert expected.keys() <= found.keys()
    stored = [key for key in expected if key[0] == "hoistway_kv_stored_bytes_total"]
    # Others may change in between.
    assert [found[key] for key in stored] == [expected[key] for key in stored]
    assert sum(found[key] for key in stored) > 0


def random_bytes(size: int, seed: int) -> bytes:
    """Bytes that are nowhere else."""
    return np.random.default_rng(seed).bytes(size)


class Held:
    """A ticket whose memory a test holds on to."""

    def __init__(self, *statuses: str, released: bool = False) -> None:
        succeeded = [status in ("ok", "exists") for status in statuses]
        self.id = 1 << 60
        self.completion = SimpleNamespace(
            ticket=self.id,
            statuses=list(statuses),
            succeeded=succeeded,
            ok=all(succeeded),
            bytes=0,
            moving=0.0,
        )
        self.is_done, self.is_released, self.is_lost = True, released, False
        # What comes instead of the next answers of `released`.
        self.interrupts: list[BaseException] = []
        self.is_cancelled = False

    def done(self) -> bool:
        return self.is_done

    def released(self) -> bool:
        if self.interrupts:
            raise self.interrupts.pop()
        return self.is_released

    def lost(self) -> bool:
        return self.is_lost

    def cancel(self) -> bool:
        self.is_cancelled = True
        return False

    def wait(self, timeout: float | None = None) -> Any:
        assert self.is_done
        return self.completion


def released_later(ticket: Held) -> threading.Timer:
    timer = threading.Timer(0.1, setattr, (ticket, "is_released", True))
    timer.start()
    return timer


def failing_on_second_call(first: Held, interrupt: type[BaseException]) -> Callable[..., Held]:
    calls: list[Any] = []

    def start(*_: Any, **__: Any) -> Held:
        calls.append(None)
        if len(calls) == 2:
            raise interrupt("of the second")
        return first

    return start


def sharded_checkpoint(path: Path, seed: int = 0) -> Path:
    """A checkpoint of three files."""
    path.mkdir(parents=True)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    tensors = [f"layers.{number}.weight" for number in range(3)]
    for number, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        write_model(path / name, {tensor: ("BF16", [512, 1024])}, seed=seed * 10 + number)
    index = {"metadata": {}, "weight_map": dict(zip(tensors, names, strict=True))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text('{"rope_theta": 10000}')
    return path
