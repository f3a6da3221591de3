"""What `just gpu` runs, on the stand-in driver: checks pass, and fail where bytes are lost; each line has a figure."""

from __future__ import annotations

import json
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


USES = """
import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from gpu import files, targets
from gpu.benchmark import CASES
from gpu.loaders import LOADERS, UnavailableError
from gpu.uses import USES, Setting

folder = Path(sys.argv[2])
tensors = {f"layers.{i}.weight": ("BF16", [256, 1024]) for i in range(16)}
path = str(files.write(folder / "model.safetensors", tensors))
told = {}
for name, use in USES.items():
    sides = {}
    error = None
    try:
        for side, measured in use(Setting([path], folder, 8 << 20, False)):
            sides.setdefault(side, []).append(measured)
    except UnavailableError as why:
        error = str(why)
    told[name] = {"sides": sides, "error": error}
document = {
    "uses": told,
    "cases": {case.name: case.title for case in CASES},
    "loaders": {
        each.name: {"package": each.package, "setting": each.setting, "is_ours": each.is_ours}
        for each in LOADERS.values()
    },
    "results": [],
    "unavailable": {},
    "skipped": [],
    "bytes": 8 << 20,
}
for line in targets.judged(document):
    print(json.dumps([line.what, line.measured, line.verdict]))
"""


def test_each_use_is_measured_and_judged(tmp_path: Path) -> None:
    done = run(USES, BENCH, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = {
        what: (measured, verdict) for what, measured, verdict in map(json.loads, done.stdout.splitlines())
    }
    # The cases were not measured here.
    uses = {what: told for what, told in lines.items() if " to GPU: " not in what}
    assert len(uses) == 16
    assert len(lines) == 27
    for what, (measured, verdict) in uses.items():
        assert measured, f"{what}: {verdict}"
        assert verdict == "met" or verdict.startswith(("missed by", "measured")), verdict
