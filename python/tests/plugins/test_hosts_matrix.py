"""What the tables of hosts say: results as they are written down, and nothing that did not run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="Python 3.10 has no parser of TOML")
sys.path.append(str(Path(__file__).parents[3] / "testkit" / "hosts"))

import matrix

WEIGHTS, TIER = (matrix.code_of("vllm", tests) for tests in matrix.HOSTS["vllm"][1].values())
PASSED = {"date": "2026-11-27", "passed": 3, "skipped": {}, "failed": [], "code": WEIGHTS}


def test_the_pages_say_what_the_results_say():
    for page, text in matrix.pages(json.loads(matrix.RESULTS.read_text())).items():
        assert page.read_text() == text, f"run testkit/hosts/matrix.py --tables: {page} is another"


def test_a_version_that_did_not_run_has_no_row_and_a_part_no_mark():
    tier = {**PASSED, "code": TIER}
    shown = matrix.table("vllm", {"vllm": {"0.9.1": {"weights": PASSED}, "0.10.0": {"KV tier": tier}}})
    assert shown.splitlines()[2:] == ["| 0.10.0 |  | 3 tests pass |", "| 0.9.1 | 3 tests pass |  |"]


def test_a_run_of_other_code_is_marked():
    for other in ({**PASSED, "code": "0"}, {key: PASSED[key] for key in PASSED if key != "code"}):
        shown = matrix.table("vllm", {"vllm": {"0.9.1": {"weights": other}}})
        assert "| 0.9.1 | 3 tests pass (of earlier code) |  |" in shown


@pytest.mark.parametrize("kind", [matrix.NO_START, matrix.NO_END, matrix.CRASH])
def test_what_has_no_counts_says_what_happened(kind):
    cell = {"date": "2026-11-27", "kind": kind, "error": "why", "code": WEIGHTS}
    shown = matrix.table("vllm", {"vllm": {"0.9.1": {"weights": cell}}})
    assert f"| 0.9.1 | {kind} |  |" in shown
    assert "* vLLM 0.9.1, weights: `why`" in shown


def test_what_fails_is_named_below_the_table():
    failed = {**PASSED, "failed": ["test_a"], "skipped": {"lacks b": 2}}
    broken = {**PASSED, "passed": 0, "kind": matrix.NO_START, "error": "ImportError: no c", "code": TIER}
    shown = matrix.table("vllm", {"vllm": {"0.9.1": {"weights": failed, "KV tier": broken}}})
    assert "| 0.9.1 | 1 of 4 tests fail, 2 skipped | tests do not start |" in shown
    assert "* vLLM 0.9.1, weights: 2 skipped: lacks b" in shown
    assert "* vLLM 0.9.1, weights: failed: `test_a`" in shown
    assert "* vLLM 0.9.1, KV tier: `ImportError: no c`" in shown


def test_a_report_of_pytest_is_counted(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase name="test_a" time="0.1"/>
        <testcase name="test_b" time="0.1"><failure message="no">E   no</failure></testcase>
        <testcase name="test_c" time="0.1"><skipped message="lacks d"/></testcase>
        <testcase name="test_e" time="0.1"><error message="in a fixture">E   no</error></testcase>
        </testsuite></testsuites>"""
    )
    assert matrix.counted(report) == {
        "passed": 1,
        "failed": ["test_b", "test_e"],
        "skipped": {"lacks d": 1},
    }
    report.write_text(
        """<testsuites><testsuite><testcase name="python.tests.test_x" time="0.000">
        <error message="collection failure">import x
E   ImportError: no x</error></testcase></testsuite></testsuites>"""
    )
    assert matrix.counted(report)["error"] == "ImportError: no x"
