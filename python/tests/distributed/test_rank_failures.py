"""What goes wrong on one rank goes wrong on all, with the same words and in time: nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import windlass
from conftest import write_model
from ranks import Outcome, attempt, on_ranks, values
from windlass import distributed as wd

SHORT = 3.0
"""Seconds that ranks wait for each other here."""


def model(directory: Path, name: str = "m.safetensors", count: int = 24) -> Path:
    directory.mkdir(exist_ok=True)
    return write_model(directory / name, {f"t{i:02}": ("BF16", [512, 1024]) for i in range(count)})


def loads(rank: int, arguments: list[dict[str, Any]], change: str = "") -> Outcome:
    """Loads with arguments of the rank's own."""
    if change == "version" and rank == 1:
        windlass.__version__ = "0.0.1"
    outcome = attempt(lambda: wd.load_file(**{"timeout": 20, **arguments[rank]}) and None)
    # The group is as good as before: ranks agreed to fail.
    total = torch.tensor([rank])
    torch.distributed.all_reduce(total)
    assert total.item() == 1
    return outcome


def test_ranks_that_differ_get_one_error_that_says_in_what(tmp_path: Path) -> None:
    path = str(model(tmp_path))
    longer = str(model(tmp_path / "longer", count=25))
    renamed = str(model(tmp_path, "renamed.safetensors"))
    other = write_model(tmp_path / "longer" / "n.safetensors", {"a": ("F32", [2, 3])})
    similar = write_model(tmp_path / "n.safetensors", {"a": ("F32", [3, 2])})
    for first, second, change, expected in [
        ({"paths": path}, {"paths": longer}, "", r"the files: rank 0: 1, number 1 is m.safetensors of \d+ bytes; rank 1"),
        ({"paths": path}, {"paths": renamed}, "", "the files: .*m.safetensors.*renamed.safetensors"),
        ({"paths": path}, {"paths": [path, renamed]}, "", "number 2 is missing"),
        ({"paths": similar}, {"paths": other}, "", "the tensors of the files: rank 0: 1 with digest .*rank 1: 1 with"),
        ({"paths": path}, {"paths": path}, "version", "version of windlass: rank 0: .*; rank 1: 0.0.1"),
        ({"paths": path, "strategy": "own"}, {"paths": path, "strategy": "share"}, "", "strategy: rank 0: own; rank 1: share"),
        ({"paths": path}, {"paths": path, "max_in_flight": "2GiB"}, "", "max_in_flight: rank 0: 1GiB; rank 1: 2GiB"),
    ]:
        # Two files with the same name of a tensor would be an error of its own.
        if isinstance(second["paths"], list):
            second["paths"] = [path, str(other)]
        outcomes = values(on_ranks(loads, 2, tmp_path, [first, second], change))
        assert [outcome.error for outcome in outcomes] == ["DistributedError"] * 2, outcomes
        assert outcomes[0].message == outcomes[1].message
        with pytest.raises(AssertionError, match=expected):
            raise AssertionError(outcomes[0].message)
