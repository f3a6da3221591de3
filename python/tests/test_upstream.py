"""The reference library's own tests, with windlass in the place of its loading functions."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import safetensors
import windlass
from safetensors.numpy import save_file

FILES = (
    "test_simple.py",
    "test_pt_comparison.py",
    "test_pread_backend.py",
    "test_multithreaded.py",
    "test_pt_model.py",
)
# What these check is the wording of messages; their values are checked below and in test_api.py.
WORDING = ("ErrorsTestCase::test_file_not_found", "ReadmeTestCase::test_numpy_slice")


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the installed version, unpacked."""
    directory = tmp_path_factory.mktemp("upstream")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--dest", str(directory), f"safetensors=={safetensors.__version__}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the source distribution cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(next(directory.glob("*.tar.gz"))) as archive:
        archive.extractall(directory, filter="data")
    return next(directory.glob("safetensors-*/bindings/python"))


@pytest.mark.parametrize("file", FILES)
def test_upstream(upstream: Path, file: str) -> None:
    (upstream / "tests" / "data").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_shim", f"tests/{file}"]
    command += [f"--deselect=tests/test_simple.py::{name}" for name in WORDING]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        command, cwd=upstream, capture_output=True, text=True, check=False, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_values_and_errors_of_the_numpy_slices(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((10, 5))
    path = tmp_path / "slice.safetensors"
    save_file({"a": array}, path)
    with windlass.open(path, framework="np") as file:
        part = file.get_slice("a")
        for index in (
            np.s_[:],
            (),
            np.s_[:2],
            np.s_[:, :2],
            np.s_[0, :2],
            np.s_[2:, 0],
            np.s_[2:, 1],
            np.s_[2:, -1],
            np.s_[2:, -5],
        ):
            np.testing.assert_array_equal(part[index], array[index])
        assert part[[]].shape == (0, 5)
        for index in (np.s_[2:, -6], [0, 1], np.s_[2:, 20], np.s_[:20], np.s_[:, :20]):
            with pytest.raises(windlass.errors.SliceError):
                part[index]
