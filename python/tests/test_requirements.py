"""What tests do where the machine lacks something: see testkit/requirements."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import skip

REQUIREMENTS = Path(__file__).parents[2] / "testkit" / "requirements"


def test_what_is_not_required_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOISTWAY_TEST_REQUIRE", "direct,io_uring")
    with pytest.raises(pytest.skip.Exception, match="lacks fuse: no /dev/fuse"):
        skip("fuse", "no /dev/fuse")


def test_what_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOISTWAY_TEST_REQUIRE", "direct, fuse")
    with pytest.raises(pytest.fail.Exception, match="lacks fuse, which HOISTWAY_TEST_REQUIRE requires"):
        skip("fuse", "no /dev/fuse")


def test_the_probe_names_requirements_of_the_tests_only() -> None:
    known = re.findall(r'Self::\w+ => "(\w+)"', (REQUIREMENTS / "src" / "lib.rs").read_text())
    assert {"fuse", "direct", "io_uring"} < set(known)
    done = subprocess.run(
        [sys.executable, REQUIREMENTS / "probe.py"], capture_output=True, text=True, check=True
    )
    found = set(filter(None, done.stdout.strip().split(",")))
    lacked = set(re.findall(r"^this machine lacks (\w+)", done.stderr, re.MULTILINE))
    assert sorted(known) == sorted([*found, *lacked])
