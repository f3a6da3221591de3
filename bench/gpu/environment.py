"""The Python that children run in: a temporary one of the carried wheels over what the machine has."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]


@dataclass
class Environment:
    """A Python, and what its processes need to find."""

    python: str
    variables: dict[str, str]
    problems: list[str] = field(default_factory=list)
    """What could not be installed, and why."""


def installed(stand_in: bool) -> Environment:
    """This very Python, with what is installed in it."""
    return Environment(sys.executable, _variables([], stand_in))


def of_wheels(wheels: Path, work: Path, stand_in: bool) -> Environment:
    """A Python with the wheels of a folder, and everything that this one has."""
    found = sorted(wheels.glob("*.whl"))
    if not any(wheel.name.startswith("hoistway-") for wheel in found):
        raise SystemExit(
            f"there is no wheel of hoistway in {wheels}: run 'just gpu-pack' before, or --installed"
        )
    target = work / "venv"
    # Without pip, which not every Python can put into a new one: this one's installs into it.
    made = _run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(target)])
    if made is None:
        python = str(target / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install"]
        environment = Environment(python, _variables([], stand_in))
    else:
        target = work / "site"
        pip = [sys.executable, "-m", "pip", "install", "--target", str(target), "--upgrade"]
        environment = Environment(sys.executable, _variables([target], stand_in), [f"venv: {made}"])
    pip += ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    pip += ["--disable-pip-version-check", "--root-user-action=ignore"]
    # One by one, so that a wheel for another machine stops none of the others.
    for wheel in found:
        failed = _run([*pip, str(wheel)])
        if failed is not None:
            environment.problems.append(f"{wheel.name}: {failed}")
    if made is None:
        _inherit(target)
    return environment


def _inherit(target: Path) -> None:
    """Shows a new environment what this Python has, should it be an environment itself: only the system's is seen."""
    (own,) = target.glob("lib/python*/site-packages")
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    (own / "inherited.pth").write_text("".join(f"{folder}\n" for folder in folders if os.path.isdir(folder)))


def _variables(folders: list[Path], stand_in: bool) -> dict[str, str]:
    paths = [str(folder) for folder in [*folders, BENCH]]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # Else jax takes most of the device's memory, and others find none.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if stand_in:
        # Without poison, large allocations are cheap. Set the variable for stricter checks.
        variables["FAKE_CUDA_POISON"] = os.environ.get("FAKE_CUDA_POISON", "0")
    return variables


def _run(command: list[str]) -> str | None:
    """`None`, or why the command failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
