"""The checks of `just gpu` that stand on loads, on the stand-in driver: they pass, and fail where bytes are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run

BENCH = Path(__file__).parents[2] / "bench"
SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from gpu import check_beside, check_uses
from gpu.subject import SkipError, Subject

subject = Subject(Path(sys.argv[2]), has_torch=False)
for check in [*check_uses.CHECKS, *check_beside.CHECKS]:
    try:
        check(subject)
        print(check.__name__, "pass")
    except SkipError as error:
        print(check.__name__, "skip", error)
    except Exception as error:
        print(check.__name__, "fail", type(error).__name__, error)
"""
# They need a torch that can use the device.
SKIPPED = {"copier_gds", "copier_nogds", "copier_unified", "nccl_with_one_rank"}


def outcomes(folder: Path) -> dict[str, str]:
    done = run(SCRIPT, BENCH, folder)
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}


def test_the_checks_pass(tmp_path: Path) -> None:
    found = outcomes(tmp_path)
    assert {name for name, outcome in found.items() if outcome.startswith("skip")} == SKIPPED
    assert {outcome for name, outcome in found.items() if name not in SKIPPED} == {"pass"}, found


def test_checks_fail_where_copies_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An error that leaves the context intact, after the copies that set the first check up.
    monkeypatch.setenv("FAKE_CUDA_FAULTS", "copy:40=1")
    failed = {name for name, outcome in outcomes(tmp_path).items() if outcome.startswith("fail")}
    assert failed
