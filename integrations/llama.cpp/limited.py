"""Runs a mixture of experts by mmap and by hoistway, each in a process of its own, under a limit of memory.

The limit is that of a control group, which counts what the page cache holds for the process too. That needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
from build import Build
from models import Shape

CGROUPS = Path("/sys/fs/cgroup")
# What a process takes beside weights: programs, the context, buffers of the graph and of the reader.
PROCESS_BYTES = 40 << 20
# Tokens of the prompt that is evaluated at first: its experts of one layer may exceed the budget.
PROMPT = 8


class NoLimitError(Exception):
    """Why no limit can be set here."""


@contextmanager
def limit_of(limit_bytes: int | None) -> Iterator[list[str]]:
    """What to put before a command so that it and what it caches take so much memory at most."""
    if limit_bytes is None:
        yield []
        return
    name = f"hoistway-{os.getpid()}"
    is_unified = (CGROUPS / "cgroup.controllers").exists()
    group = CGROUPS / name if is_unified else CGROUPS / "memory" / name
    try:
        group.mkdir()
        (group / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        # Nothing may be swapped instead, where the kernel counts that.
        swap, most = ("memory.swap.max", 0) if is_unified else ("memory.memsw.limit_in_bytes", limit_bytes)
        if (group / swap).exists():
            (group / swap).write_text(str(most))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        raise NoLimitError(f"a limit of memory needs root and control groups: {error}") from error
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def budget_of(limit_bytes: int, model: Path, shape: Shape) -> int:
    """What a limit leaves for experts."""
    experts = shape.layers * shape.experts * models.expert_bytes(shape)
    dense = model.stat().st_size - experts
    batch = min(shape.experts, PROMPT * shape.experts_used) * models.expert_bytes(shape)
    return limit_bytes - dense - batch - PROCESS_BYTES


def run_stock(
    stock: Build, model: Path, *, mode: str, limit: int | None, tokens: int, threads: int
) -> dict[str, Any]:
    """Evaluates a model that llama.cpp loads by itself: by `mmap`, or into memory by `none`."""
    return result_of([stock.logits, "--mode", mode], model, limit, tokens, threads)


def run_streamed(
    stock: Build, model: Path, *, budget: int, limit: int | None, tokens: int, threads: int
) -> dict[str, Any]:
    """Evaluates a model of which hoistway reads the experts that are used."""
    command = [stock.stream_experts, "--budget-mib", str(budget / 2**20)]
    return result_of(command, model, limit, tokens, threads)


def result_of(
    command: list[str | Path], model: Path, limit: int | None, tokens: int, threads: int
) -> dict[str, Any]:
    """What a program printed, with its tokens per second, or that it was killed for memory."""
    command = [*command, "--tokens", str(tokens), "--threads", str(threads), model]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    with limit_of(limit) as within:
        done = subprocess.run(
            [*within, *command], check=False, capture_output=True, text=True, env=environment
        )
    if done.returncode in (-9, 137):
        return {"killed": True}
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout)
    result["tokens_per_second"] = (tokens - 1) / result["decode_seconds"]
    return result
