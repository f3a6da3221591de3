"""Runs the tests of plug-ins and adapters on several versions of their hosts, and writes the tables of docs.

``matrix.py DIRECTORY [HOST[==VERSION][:PART]]...`` runs the versions of ``versions.toml`` and those that ``just
test-hosts`` runs, or those that are named. A cell of a table is a run: what did not run has none, and what is not run
again stays as it was, and is marked if the code has changed since. ``matrix.py --tables`` writes the tables alone, of
the results that are there.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fetch
import tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
PAGE = ROOT / "docs" / "hosts.md"

# By host: its name, the tests of each part, and where its table is shown.
HOSTS: dict[str, tuple[str, dict[str, list[str]], list[str]]] = {
    "vllm": (
        "vLLM",
        {
            "weights": ["python/tests/plugins/test_vllm.py"],
            "KV tier": ["python/tests/kv/adapters/test_adapter_vllm.py"],
        },
        ["docs/vllm.md"],
    ),
    "sglang": (
        "SGLang",
        {
            "weights": ["python/tests/plugins/test_sglang.py"],
            "KV storage": ["python/tests/kv/adapters/test_adapter_sglang.py"],
        },
        ["docs/sglang.md"],
    ),
    "lmcache": ("LMCache", {"KV adapter": ["python/tests/kv/adapters/test_adapter_lmcache.py"]}, []),
    "ucm": ("UCM", {"KV store": ["python/tests/kv/adapters/test_adapter_ucm.py"]}, []),
    "safetensors": (
        "safetensors",
        {
            "drop-in": [
                f"python/tests/compat/test_safetensors_{name}.py"
                for name in ("differential", "files", "install", "saving", "serialize")
            ]
        },
        [],
    ),
    "transformers": (
        "transformers",
        {"with the drop-in": ["python/tests/compat/test_safetensors_hosts.py"]},
        [],
    ),
}
LONGEST_S = 1800
MOST_NAMES = 4
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}

# What a run is of, besides its tests and the host.
ENGINES = ("vllm", "sglang", "lmcache", "ucm")
RUNNER = ("testkit/hosts/matrix.py", "testkit/hosts/fetch.py", "testkit/hosts/requirements.txt")
PLUGINS = ("python/hoistway/plugins", "python/hoistway/kv/adapters", "python/tests/plugins/plugin_hosts.py")
DROP_IN = ("python/hoistway/compat", "python/hoistway/_hook")

# Why a run has no counts.
NO_START, NO_END, CRASH = "tests do not start", "tests do not end", "tests crash"
OTHER_CODE = " (of earlier code)"


@dataclass(frozen=True)
class Version:
    """A version of a host, and what it wants beside it."""

    host: str
    version: str
    requirement: str
    beside: tuple[str, ...] = ()


def main(arguments: list[str]) -> None:
    """Runs what is named, and writes the tables."""
    if not arguments or (
        any(argument.startswith("-") for argument in arguments) and arguments != ["--tables"]
    ):
        raise SystemExit(__doc__)
    if arguments != ["--tables"]:
        at = Path(arguments[0]).resolve()
        for version in versions():
            for part, tests in HOSTS[version.host][1].items():
                names = (version.host, f"{version.host}=={version.version}")
                if not arguments[1:] or {*names, *(f"{name}:{part}" for name in names)} & set(arguments[1:]):
                    run(version, part, tests, at)
    for page, text in pages(json.loads(RESULTS.read_text())).items():
        page.write_text(text)


def versions() -> Iterator[Version]:
    """All versions, the newest of a host first."""
    listed = tomllib.loads((HERE / "versions.toml").read_text())
    for host in HOSTS:
        pin = HERE / f"{host}.txt"
        if pin.exists():
            yield Version(host, fetch.version_in(pin), pin.read_text())
        for version, entry in listed.get(host, {}).items():
            hashes = "".join(f" \\\n    --hash=sha256:{one}" for one in entry.get("sha256", ()))
            requirement = f"{entry.get('package', host)}=={version}{hashes}\n"
            yield Version(
                host,
                version,
                requirement,
                tuple(listed["beside"][entry["beside"]]) if "beside" in entry else (),
            )


def run(version: Version, part: str, tests: list[str], at: Path) -> None:
    """Runs the tests of a part of a version, and adds what came of them to the results."""
    shown = f"{HOSTS[version.host][0]} {version.version}, {part}"
    try:
        paths = prepare(version, at)
    except (subprocess.CalledProcessError, StopIteration) as error:
        print(f"{shown}: cannot be had, and is left out: {error}", file=sys.stderr)
        return
    code = code_of(version.host, tests)
    cell = test(version, part, tests, paths, at)
    if not cell.get("error") and not cell["passed"] and not cell["failed"]:
        print(f"{shown}: no test ran, and it is left out: {', '.join(cell['skipped'])}", file=sys.stderr)
        return
    cell["code"] = code
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(version.host, {}).setdefault(version.version, {})[part] = cell
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print(f"{shown}: {said(cell)}", flush=True)


def code_of(host: str, tests: list[str]) -> str:
    """What tells the code of a run from another's: plug-ins, adapters, tests, and what runs them."""
    digest = hashlib.sha256()
    for name in sorted([*tests, *RUNNER, *(PLUGINS if host in ENGINES else DROP_IN)]):
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(ROOT).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def prepare(version: Version, at: Path) -> list[Path]:
    """Fetches a version, unless it is there, and returns what belongs into the path of modules, in order."""
    key = f"{version.host}-{version.version}"
    to, beside, stamp = at / key, at / f"{key}-beside", at / f"{key}.stamp"
    packages = at.parent / "hosts" / "packages"
    state = json.dumps([version.requirement, version.beside, sys.version])
    if not stamp.is_file() or stamp.read_text() != state:
        for old in (to, beside):
            shutil.rmtree(old, ignore_errors=True)
        at.mkdir(parents=True, exist_ok=True)
        pin, downloads = at / f"{key}.txt", at / f"{key}-downloads"
        pin.write_text(version.requirement)
        if version.host in ENGINES:
            fetch.fetch(pin, downloads, packages, to)
        else:
            fetch.pip("install", "--no-deps", "--target", to, "--requirement", pin)
        if version.beside:
            fetch.pip("install", "--no-deps", "--target", beside, *version.beside)
        shutil.rmtree(downloads, ignore_errors=True)
        stamp.write_text(state)
    is_engine = version.host in ENGINES
    return [to, *([beside] if version.beside else []), *([packages] if is_engine else [])]


def test(version: Version, part: str, tests: list[str], paths: list[Path], at: Path) -> dict[str, Any]:
    """Runs the tests of a part, and returns what came of them."""
    key = f"{version.host}-{version.version}-{part.replace(' ', '-')}"
    report, output = at / f"{key}.xml", at / f"{key}.log"
    report.unlink(missing_ok=True)
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    command = [sys.executable, "-m", "pytest", "--basetemp", f"target/pytest-{key}", "-p", "no:cacheprovider"]
    with output.open("w") as log:
        try:
            ran = subprocess.run(
                [*command, f"--junitxml={report}", *tests],
                cwd=ROOT,
                # Python keeps what it compiles: sources of a host take longer to compile than to test.
                env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]), **COMPILED},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=LONGEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"date": today(), "kind": NO_END, "error": f"did not end within {LONGEST_S} s"}
    shutil.rmtree(ROOT / f"target/pytest-{key}", ignore_errors=True)
    if not report.exists():
        kind = CRASH if ran.returncode < 0 else NO_START
        return {"date": today(), "kind": kind, "error": f"pytest ended with {ran.returncode}"}
    return {"date": today(), **counted(report)}


def counted(report: Path) -> dict[str, Any]:
    """What a report of pytest says."""
    cell: dict[str, Any] = {"passed": 0, "skipped": {}, "failed": []}
    for case in ET.parse(report).iter("testcase"):
        name, kind = case.get("name", ""), next((child for child in case if child.tag != "system-out"), None)
        if kind is None:
            cell["passed"] += 1
        elif kind.tag == "skipped":
            reason = kind.get("message", "")
            cell["skipped"][reason] = cell["skipped"].get(reason, 0) + 1
        elif kind.tag == "error" and not case.get("time", "").strip("0."):
            # The module itself: the last line of the traceback says why.
            lines = re.findall(r"^E +(\S.*)$", kind.text or "", re.MULTILINE)
            # Without the place of the module on this machine.
            cell["kind"] = NO_START
            cell["error"] = re.sub(r" \(/[^)]*\)$", "", lines[-1] if lines else kind.get("message", ""))
        else:
            cell["failed"].append(name)
    return cell


def today() -> str:
    """The date of a run."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def said(cell: dict[str, Any]) -> str:
    """What a cell of a table says."""
    if "error" in cell:
        return str(cell["kind"])
    skipped = sum(cell["skipped"].values())
    text = (
        f"{cell['passed']} tests pass"
        if not cell["failed"]
        else (f"{len(cell['failed'])} of {cell['passed'] + len(cell['failed'])} tests fail")
    )
    return f"{text}, {skipped} skipped" if skipped else text


def table(host: str, results: dict[str, Any]) -> str:
    """The table of a host: a row for each version that ran, and below it what is not plain success."""
    name, parts, _ = HOSTS[host]
    now = {part: code_of(host, tests) for part, tests in parts.items()}
    lines = [f"| {name} | {' | '.join(parts)} |", f"|---|{'---|' * len(parts)}"]
    notes = []
    ran = results.get(host, {})
    for version in sorted(ran, key=ordinal, reverse=True):
        cells = [
            said(cell) + ("" if cell.get("code") == now[part] else OTHER_CODE) if cell else ""
            for part, cell in ((part, ran[version].get(part)) for part in parts)
        ]
        lines.append(f"| {version} | {' | '.join(cells)} |")
        for part in parts:
            notes += [f"* {name} {version}, {part}: {note}" for note in explained(ran[version].get(part, {}))]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def explained(cell: dict[str, Any]) -> Iterator[str]:
    """What has to be said of a cell in words."""
    if "error" in cell:
        yield f"`{cell['error']}`"
    for reason, count in sorted(cell.get("skipped", {}).items()):
        yield f"{count} skipped: {reason}"
    if cell.get("failed"):
        names = [f"`{name}`" for name in cell["failed"][:MOST_NAMES]]
        more = len(cell["failed"]) - len(names)
        yield f"failed: {', '.join(names)}{f' and {more} others' if more else ''}"


def ordinal(version: str) -> tuple[int, ...]:
    """By what versions are sorted."""
    return tuple(map(int, re.findall(r"\d+", version)))


def pages(results: dict[str, Any]) -> dict[Path, str]:
    """The page of all tables, and the hosts' own pages, which have theirs at the top."""
    dates = [cell["date"] for ran in results.values() for parts in ran.values() for cell in parts.values()]
    hosts = [host for host in HOSTS if results.get(host)]
    text = [
        "<!-- Written by `just test-hosts-matrix`. -->",
        "# Versions of hosts",
        "",
        "Each row is a version of a host on whose sources the tests of plug-ins and adapters ran, on the CPU and",
        "without the host's compiled kernels. A version that is not listed was not run, and neither was an empty cell.",
        f"“{OTHER_CODE.strip(' ()')}”: plug-ins, adapters, their tests or what runs them have changed since that run.",
        f"The runs are of {' to '.join(sorted({min(dates), max(dates)}))}." if dates else "",
        "",
    ]
    for host in hosts:
        text += [f"## {HOSTS[host][0]}", "", table(host, results)]
    written = {PAGE: "\n".join(text).rstrip() + "\n"}
    for host in hosts:
        for page in HOSTS[host][2]:
            written[ROOT / page] = inserted(ROOT / page, host, table(host, results))
    return written


def inserted(page: Path, host: str, shown: str) -> str:
    """A page with a table between its two marks."""
    begin, end = f"<!-- hosts: {host} -->\n", "<!-- hosts: end -->\n"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    if not rest:
        raise ValueError(f"{page} has no mark {begin!r}")
    rows = "\n".join(line for line in shown.splitlines() if line.startswith("|"))
    return f"{before}{begin}\n{rows}\n\n{end}{after}"


if __name__ == "__main__":
    main(sys.argv[1:])
