"""What the package and its command import, which is most of the time that they take to start, and when."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import hoistway
import pytest
from hoistway._devices import package_directories

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
before = set(sys.modules)
{code}
after = set(sys.modules)
import json
print(json.dumps(sorted(after - before)))
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "sys.argv[0] = 'hoistway'; import hoistway",
        "sys.argv = ['hoistway', '--version']; from hoistway._command import main; assert main() == 0",
    ],
)
def test_nothing_slow_is_imported_for_the_command(code: str) -> None:
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


def test_a_program_imports_all_public_names_with_the_package() -> None:
    assert {f"hoistway.{module}" for module in hoistway._MODULES} <= imported_by("import hoistway")


def run(code: str, *arguments: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python that has imported nothing, with no variables of hoistway's but these."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HOISTWAY_")}
    return subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(PACKAGES)!r})\n{code}",
            *arguments,
        ],
        env=own | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A checkpoint without tensors."""
    hoistway.save_file({}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_the_first_event_of_the_command_brings_logging() -> None:
    """The engine imports it: a warning is written as `logging` does without handlers."""
    done = run(
        """
sys.argv[0] = "hoistway"
import hoistway
assert "logging" not in sys.modules
from hoistway import _native
_native.doctor([])
""",
        HOISTWAY_ROUT="auto",
    )
    assert done.returncode == 0, done.stderr
    assert "HOISTWAY_ROUT is not one of hoistway's" in done.stderr


def test_a_level_of_the_package_is_known_to_a_program_that_imports_logging_later() -> None:
    done = run("import hoistway, logging; logging.getLogger('hoistway').setLevel('TRACE')")
    assert done.returncode == 0, done.stderr


def test_events_of_what_a_program_registers_for_its_end_are_logged(empty: Path) -> None:
    done = run(
        """
import hoistway, atexit, logging
atexit.register(lambda: hoistway.load_file(sys.argv[1], framework="raw"))
hoistway.load_file
""",
        empty,
        HOISTWAY_ROUT="auto",
    )
    assert done.returncode == 0, done.stderr
    assert "HOISTWAY_ROUT is not one of hoistway's" in done.stderr


def test_an_event_of_the_engine_leaves_the_main_thread_as_it_is() -> None:
    """The engine's thread imports `logging` for an event, and Python takes the importer of `threading` for the main."""
    done = run(
        """
sys.argv[0] = "hoistway"
import hoistway
assert "threading" not in sys.modules
hoistway.doctor
assert "threading" in sys.modules
hoistway.doctor()
import threading
assert threading.main_thread() is threading.current_thread()
""",
        HOISTWAY_ROUT="auto",
    )
    assert done.returncode == 0, done.stderr


NO_FILES = "sys.meta_path = [finder for finder in sys.meta_path if finder.__name__ != 'PathFinder']"
"""Finds no modules in files any more, as if this process had given up the right to read them."""


def test_after_the_package_each_function_imports_nothing(empty: Path) -> None:
    done = run(
        f"""
import hoistway
from hoistway import *
{NO_FILES}
load_file(sys.argv[1], framework="raw")
hoistway.open(sys.argv[1], framework="raw")._repr_html_()
saved = save({{}})
load(saved, framework="raw")
list(iter_tensors(sys.argv[1], framework="raw"))
save_file({{}}, sys.argv[1] + "2")
doctor()._repr_html_()
memory_limits()
release_devices()
for start, error in (
    (lambda: load_file("/nonexistent"), hoistway.errors.CheckpointNotFoundError),
    (lambda: load_file(sys.argv[1], rout=1), hoistway.errors.UnknownOptionError),
    (lambda: load_file(sys.argv[1], framework="raw", route="odd"), hoistway.errors.OptionError),
):
    try:
        start()
    except error:
        pass
    else:
        raise SystemExit("no error")
""",
        empty,
    )
    assert done.returncode == 0, done.stderr


def test_a_finder_that_raises_finds_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising:
        def find_spec(self, name: str, *others: object) -> None:
            raise ValueError(name)

    monkeypatch.setattr(sys, "meta_path", [Raising()])
    assert package_directories("hoistway_none") == []
