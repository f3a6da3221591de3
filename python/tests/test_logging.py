"""What the engine logs reaches the standard library's logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hoistway import _logging

# Cuts a model short after its header was read, so that its load fails.
FAILING = """
import logging, os, sys
import hoistway
def fail(path):
    checkpoint = hoistway.open(path, framework="numpy")
    os.truncate(path, os.path.getsize(path) - 1)
    try:
        checkpoint.load()
    except (hoistway.errors.FileChangedError, hoistway.errors.TruncatedError):
        return
    raise SystemExit("the load did not fail")
"""


def run(code: str, *arguments: Path, **environment: str) -> str:
    """What a program writes to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING + code, *map(str, arguments)],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_failed_load_is_a_record_with_level_name_reason_and_time(model: Path) -> None:
    text = run(
        """
import time
class Printing(logging.Handler):
    def emit(self, record):
        print(record.name, record.levelname, record.threadName, abs(record.created - time.time()) < 60, file=sys.stderr)
        print(record.getMessage(), file=sys.stderr)
logging.getLogger("hoistway").addHandler(Printing())
fail(sys.argv[1])
""",
        model,
        HOISTWAY_LOG="debug",
    )
    first, second = text.splitlines()
    assert first == "hoistway.load.job DEBUG hoistway-log True"
    assert second.startswith("load failed error=")
    assert str(model) in second


def test_what_logging_does_not_want_is_left_out(model: Path) -> None:
    wanted = "logging.getLogger('hoistway').setLevel('INFO'); fail(sys.argv[1])"
    assert "load failed" not in run(wanted, model, HOISTWAY_LOG="debug")


def test_a_variable_without_meaning_is_named_and_ignored(model: Path) -> None:
    text = run("fail(sys.argv[1])", model, HOISTWAY_LOG="hoistway=loud")
    assert text.startswith("HOISTWAY_LOG=hoistway=loud is ignored: ")
    assert "load failed" not in text


def test_directives_that_name_spans_are_none(model: Path) -> None:
    text = run("fail(sys.argv[1])", model, HOISTWAY_LOG="hoistway[load]=debug")
    assert text.startswith("HOISTWAY_LOG=hoistway[load]=debug is ignored: a directive names a span")


def test_a_misspelt_variable_is_named(model: Path) -> None:
    text = run("fail(sys.argv[1])", model, HOISTWAY_ROUT="threads")
    assert (
        text == "the environment variable HOISTWAY_ROUT is not one of hoistway's: is HOISTWAY_ROUTE meant?\n"
    )


def test_without_the_variable_debugging_is_left_out(model: Path) -> None:
    assert "load failed" not in run("logging.basicConfig(level='DEBUG'); fail(sys.argv[1])", model)


def test_records_that_are_queued_at_the_exit_are_written(model: Path) -> None:
    text = run("logging.basicConfig(level='DEBUG'); fail(sys.argv[1])", model, HOISTWAY_LOG="debug")
    assert "load failed" in text


def test_the_variable_writes_to_standard_error_without_a_handler(model: Path) -> None:
    text = run("fail(sys.argv[1])", model, HOISTWAY_LOG="debug")
    assert text.count("DEBUG hoistway.load.job: load failed") == 1


def test_the_variable_writes_once_beside_handlers_of_the_program(model: Path) -> None:
    text = run("logging.basicConfig(level='DEBUG'); fail(sys.argv[1])", model, HOISTWAY_LOG="debug")
    assert text.count("load failed") == 1


def test_the_variable_chooses_parts(model: Path) -> None:
    text = run(
        "logging.basicConfig(level='DEBUG'); fail(sys.argv[1])", model, HOISTWAY_LOG="hoistway_kv=debug"
    )
    assert "load failed" not in text


def test_a_child_of_fork_logs_by_itself(model: Path) -> None:
    text = run(
        """
import shutil
logging.basicConfig(level='DEBUG')
shutil.copy(sys.argv[1], sys.argv[1] + ".second")
fail(sys.argv[1])
child = os.fork()
if child == 0:
    fail(sys.argv[1] + ".second")
    hoistway._native.stop_log()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
        model,
        HOISTWAY_LOG="debug",
    )
    assert text.count("load failed error=") == 2
    assert ".second" in text


def test_a_handler_that_fails_costs_no_other_record(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            if record.getMessage() == "one":
                raise ValueError("a handler of the program's")
            return True

    monkeypatch.setattr(logging.getLogger("hoistway.kv"), "handlers", [Failing()])
    _logging.emit([(30, "hoistway_kv", "one", 1.5), (30, "hoistway_kv", "two", 1.5)], 0)
    assert "ValueError: a handler of the program's" in capsys.readouterr().err
    assert [record.getMessage() for record in caplog.records] == ["two"]


def test_what_came_too_fast_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    _logging.emit([(30, "hoistway.kv_like", "one", 1.5)], 7)
    assert [record.getMessage() for record in caplog.records] == [
        "7 events came faster than they could be logged, and are left out",
        "one",
    ]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("hoistway.load.job", "hoistway.load.job"),
        ("hoistway_kv.store.events", "hoistway.kv.store.events"),
        ("hoistway_io", "hoistway.io"),
        ("rustls.client", "hoistway.rustls.client"),
    ],
)
def test_loggers_lie_below_that_of_the_package(target: str, name: str) -> None:
    assert _logging._logger_name(target) == name
