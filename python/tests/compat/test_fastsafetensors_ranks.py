"""Several ranks over gloo: what each of them gets; see fastsafetensors_ranks.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BITS, write_model

pytest.importorskip("fastsafetensors")
import fastsafetensors_ranks

# Of all types that torch has, sizes that no number of ranks divides, and some smaller than it.
SHAPES = [[5, 6], [3, 2, 8]]
ODD = {
    f"{dtype}.{number}": (dtype, shape)
    for dtype in sorted(set(BITS) - {"F6_E2M3", "F6_E3M2"})
    for number, shape in enumerate([*SHAPES, [3], [0, 4], [4, 0]] if dtype in ("BF16", "U16") else SHAPES)
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("ranks")
    first = {"q": ("F32", [8, 4]), "q.e4m3": ("F8_E4M3", [6, 4]), "k.e4m3": ("F8_E4M3", [6, 4])}
    second = {"k": ("F32", [8, 4]), "v": ("F32", [8, 4]), "k.bf16": ("BF16", [8, 4]), "scalar": ("F64", [])}
    return [
        str(write_model(directory / f"{number}.safetensors", tensors, seed=number))
        for number, tensors in enumerate([first, second, ODD])
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_its_parts(ranks: int, files: list[str], tmp_path: Path) -> None:
    command = [sys.executable, fastsafetensors_ranks.__file__, str(ranks), str(tmp_path / "store"), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"after {done.stdout}: {done.stderr}"
    assert len(done.stdout.split()) == len(fastsafetensors_ranks.CASES)
