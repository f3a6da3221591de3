"""The command that the package brings: the one of hoistway-cli, in a process of Python's."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import make_cold, write_model

COMMAND = [sys.executable, "-m", "hoistway"]


def command(*arguments: object, **options) -> subprocess.CompletedProcess[bytes]:
    """Runs the command to its end."""
    words = [argument if isinstance(argument, bytes) else str(argument) for argument in arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **options}
    return subprocess.run([*COMMAND, *words], check=False, **options)


def start_slow_load(directory: Path, **options) -> subprocess.Popen[bytes]:
    """A load by reads so short and so few at a time that it takes much longer than the test waits."""
    path = write_model(directory / "m.safetensors", {"a": ("U8", [256 << 20])})
    make_cold(path)
    slow = {"ROUTE": "threads", "DIRECT": "always", "CHUNK": "4KiB", "THREADS": "1"}
    environment = os.environ | {f"HOISTWAY_{name}": value for name, value in slow.items()}
    child = subprocess.Popen(
        [*COMMAND, "load", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        **options,
    )
    deadline = time.monotonic() + 60
    while not has_open(child, path):
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child


def has_open(child: subprocess.Popen[bytes], path: Path) -> bool:
    """Whether a process has a file open."""
    # Both may go while they are looked at.
    with suppress(OSError):
        for descriptor in Path(f"/proc/{child.pid}/fd").iterdir():
            with suppress(OSError):
                if descriptor.readlink() == path:
                    return True
    return False


def test_the_entry_point_and_the_module_are_the_command() -> None:
    [entry] = [
        entry
        for entry in importlib.metadata.entry_points(group="console_scripts", name="hoistway")
        if entry.dist is not None and entry.dist.name == "hoistway"
    ]
    assert entry.value == "hoistway._command:main"
    done = command("--version")
    assert (done.returncode, done.stdout.decode()) == (0, f"hoistway {hoistway.__version__}\n")


def test_results_are_printed(model: Path) -> None:
    inspected = json.loads(command("inspect", "--json", model).stdout)
    assert {tensor["name"] for tensor in inspected["tensors"]} == set(hoistway.open(model).keys())
    loaded = command("load", model, "--json")
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["load", "--no-such-option"], 2), (["inspect", "/no/such/file"], 3)],
)
def test_exit_codes_are_those_of_the_program(arguments: list[str], code: int) -> None:
    done = command(*arguments)
    assert done.returncode == code, done
    assert b"Traceback" not in done.stderr
    # What is asked for goes to standard output, errors do not.
    assert bool(done.stdout) == (code == 0)
    assert bool(done.stderr) == (code != 0)


def test_names_of_files_need_not_be_text(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [100])})
    named = os.fsencode(tmp_path) + b"/\xff.safetensors"
    os.rename(path, named)
    done = command("inspect", named)
    assert done.returncode == 0, done.stderr


def test_a_reader_of_the_output_may_leave() -> None:
    read, write = os.pipe()
    os.close(read)
    done = command("completions", "bash", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_file_does_not_take_the_place_of_closed_output(model: Path) -> None:
    before = model.read_bytes()
    done = command("inspect", model, stdout=None, preexec_fn=lambda: os.close(1))
    assert done.returncode == 0, done.stderr
    assert model.read_bytes() == before


def test_ctrl_c_ends_the_process_at_once(tmp_path: Path) -> None:
    # A shell that runs the tests in the background makes them, and their children, ignore it.
    def heed() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    child = start_slow_load(tmp_path, preexec_fn=heed)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGINT
    assert (output, errors) == (b"", b"")


def test_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    child = start_slow_load(tmp_path, preexec_fn=ignore)
    child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    # A fast machine may have loaded all of it.
    assert child.poll() in (None, 0)
    child.kill()
    child.communicate()


def test_processes_of_the_command_run_it_too(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(0).bytes(4 << 20))
    done = command("bench", "read", path, "--num-processes", 2, "--iterations", 1, "--warmup", 0, "--json")
    assert done.returncode == 0, done.stderr
    measurements = json.loads(done.stdout)["measurements"]
    assert sum(measurement["total_bytes_read"] for measurement in measurements) >= 4 << 20
