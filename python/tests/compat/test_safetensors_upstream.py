"""The reference library's own tests, on the drop-in that is installed in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import safetensors

# Debian 12's Python 3.11.2 has no filters yet.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

# Not test_threadable.py: it compares the times at which threads begin and end, which depend on what else the machine
# does. That other threads run during a save, test_save.py says.
FILES = (
    "test_simple.py",
    "test_handle.py",
    "test_pt_comparison.py",
    "test_pt_model.py",
    "test_pread_backend.py",
    "test_multithreaded.py",
)

# It compares a sentence of some length; that the error is a ValueError, other tests say.
WORDING = "tests/test_pt_comparison.py::TorchTestCase::test_sparse"

CONFTEST = """
from hoistway.compat import safetensors

safetensors.install()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"hoistway loaded {len(safetensors.reports())} files")
"""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the installed version, unpacked."""
    directory = tmp_path_factory.mktemp("upstream")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--dest", str(directory), f"safetensors=={safetensors.__version__}"]
    # Its build system, which pip asks for the name of what it downloaded, is installed beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    if done.returncode != 0:
        pytest.skip(f"the source distribution cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(next(directory.glob("*.tar.gz"))) as archive:
        archive.extractall(directory, **SAFELY)
    bindings = next(directory.glob("safetensors-*/bindings/python"))
    (bindings / "tests" / "data").mkdir(exist_ok=True)
    (bindings / "tests" / "conftest.py").write_text(CONFTEST)
    return bindings


def test_they_pass(upstream: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--deselect={WORDING}"]
    command += [f"tests/{file}" for file in FILES]
    done = subprocess.run(command, cwd=upstream, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "hoistway loaded" in done.stdout
    assert "hoistway loaded 0" not in done.stdout
