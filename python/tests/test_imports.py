"""What the package and its command import, which is most of the time that they take to start."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import hoistway
import pytest

PACKAGES = Path(hoistway.__file__).parent.parent

SLOW = {
    "collections",
    "contextlib",
    "ctypes",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "html",
    "importlib.util",
    "inspect",
    "json",
    "logging",
    "numpy",
    "pathlib",
    "re",
    "signal",
    "threading",
    "torch",
    "traceback",
    "typing",
}
"""Modules that take longer to import than all that the command needs."""


def imported_by(code: str) -> set[str]:
    """The modules that code imports in a Python that has imported none of them, as `site` might."""
    program = f"""
import sys
sys.path.insert(0, {str(PACKAGES)!r})
before = set(sys.modules)
{code}
after = set(sys.modules)
import json
print(json.dumps(sorted(after - before)))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import hoistway",
        "sys.argv[1:] = ['--version']; from hoistway._command import main; assert main() == 0",
    ],
)
def test_nothing_slow_is_imported_for_the_package_or_the_command(code: str) -> None:
    imported = imported_by(code)
    assert "hoistway._native" in imported
    assert not imported & SLOW
    assert {name for name in imported if name.startswith("hoistway.")} <= {
        "hoistway._command",
        "hoistway._devices",
        "hoistway._native",
        "hoistway._start",
        "hoistway.errors",
    }


def test_each_public_name_is_what_it_says_when_it_is_first_used() -> None:
    for name in hoistway.__all__:
        thing = getattr(hoistway, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__name__ == ("Checkpoint" if name == "open" else name)
    assert hoistway.open is hoistway.Checkpoint
    # Those that wait are all public, and found only once.
    assert set(hoistway._HOMES) <= set(hoistway.__all__)
    assert "load_file" in vars(hoistway)
    with pytest.raises(AttributeError, match="module 'hoistway' has no attribute 'load_fil'"):
        _ = hoistway.load_fil


def test_a_star_imports_all_public_names_at_once() -> None:
    imported = imported_by("names = {}; exec('from hoistway import *', names); assert 'load_file' in names")
    assert "hoistway._checkpoint" in imported


def test_the_first_event_brings_logging(tmp_path: Path) -> None:
    """Also if the program has not imported it: a warning is written as `logging` does without handlers."""
    hoistway.save_file({}, tmp_path / "a.safetensors")
    code = "import os; os.environ['HOISTWAY_ROUT'] = 'auto'; import hoistway; assert 'logging' not in sys.modules"
    load = "hoistway.load_file(sys.argv[1], framework='raw')"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); {code}; {load}",
            tmp_path / "a.safetensors",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "HOISTWAY_ROUT is not one of hoistway's" in done.stderr


def test_an_event_of_the_engine_leaves_the_main_thread_as_it_is() -> None:
    """The engine's thread imports `logging` for an event, and Python takes the importer of `threading` for the main."""
    code = (
        "import os; os.environ['HOISTWAY_ROUT'] = 'auto'; import hoistway; assert 'threading' not in sys.modules; "
        "hoistway.doctor(); import threading; assert threading.main_thread() is threading.current_thread()"
    )
    imported = imported_by(code)
    assert "hoistway._doctor" in imported
