"""Replays traces of routing under every policy that evicts experts, and compares the policies' hit rates.

Recorded traces are the files of a directory, CSV or JSON lines as docs/moe-replay.md describes them. Synthetic traces
are made here. All results are counts of `hoistway moe replay`, so they are the same on every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from host import told_by

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "target/release/hoistway"
# The ceiling, the default, and the others.
POLICIES = ("belady", "ewma2", "lru", "lfu", "arc", "slru")
# The policies of the tables of synthetic traces, and their budgets in token cycles.
SHORT_POLICIES = ("belady", "ewma2", "lru")
SHORT_BUDGETS = (1.25, 2.0, 4.0)
# The default policy is to find as many percentage points more than LRU at these budgets, and never less.
GOAL_POINTS = 2.5
GOAL_BUDGETS = (1.25, 4.0)
# The options of synthetic traces, by name.
COMMON = ("--prefill", "32", "--exponent", "0.8")
SYNTHETIC: dict[str, tuple[str, ...]] = {
    "uniform": ("uniform", *COMMON),
    "zipf": ("zipf", *COMMON),
    **{f"sticky, stay {stay}": ("sticky", *COMMON, "--stay", stay) for stay in ("0.2", "0.4", "0.6", "0.8")},
    "scan": ("scan", *COMMON),
}


def replay(program: Path, trace: Path, policies: tuple[str, ...]) -> dict[str, Any]:
    """A trace's description and its rows, for the budgets that the command takes by default."""
    chosen = [f"--policy={policy}" for policy in policies]
    # The first line of the table says what the trace is of.
    table = told(program, "replay", trace, "--policy=lru", "--budget=2c")
    rows = json.loads(told(program, "replay", trace, *chosen, "--json"))["rows"]
    holes = rows[0]["holes"]
    for row in rows:
        del row["holes"], row["tokens_per_second"]
    return {"trace": table.partition("\n")[0], "holes": holes, "results": rows}


def told(program: Path, *arguments: str | Path) -> str:
    """What a subcommand of `hoistway moe` prints."""
    command = [program, "moe", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return done.stdout


def measure(program: Path, directory: Path) -> dict[str, Any]:
    """The replays of the recorded traces in a directory, and of synthetic ones."""
    recorded = []
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        recorded.append({"sha256": digest, **replay(program, path, POLICIES)})
    if not recorded:
        raise SystemExit(f"there is no trace in {directory}")
    synthetic = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        for name, options in SYNTHETIC.items():
            told(program, "generate", *options, "--output", path)
            results = replay(program, path, SHORT_POLICIES)
            synthetic.append({"name": name, "options": " ".join(options), **results})
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": told_by("git", "-C", str(HERE), "describe", "--always", "--dirty"),
        "recorded": recorded,
        "synthetic": synthetic,
    }


def by_budget(case: dict[str, Any]) -> dict[float, dict[str, float]]:
    """Hit rates in percent by budget in token cycles, then by policy."""
    rates: dict[float, dict[str, float]] = {}
    for row in case["results"]:
        rates.setdefault(round(row["budget_cycles"], 2), {})[row["policy"]] = 100 * row["hit_rate"]
    return rates


def gain(rates: dict[str, float]) -> float:
    """The percentage points that the default policy finds more than LRU."""
    return rates["ewma2"] - rates["lru"]


def verdict(recorded: list[dict[str, Any]]) -> str:
    """Whether the default policy reaches its goal, and the least gain."""
    first, last = GOAL_BUDGETS
    rates = [(budget, gain(found)) for case in recorded for budget, found in by_budget(case).items()]
    goal = min(points for budget, points in rates if first <= budget <= last)
    least = min(points for _, points in rates)
    told = "reached" if goal >= GOAL_POINTS and least >= 0 else "missed"
    return (
        f"The goal of the default, `ewma2`, is {GOAL_POINTS} percentage points more than `lru` with {first} to "
        f"{last:g} token cycles, and never less with any budget: {told}. The least gains are {goal:+.1f} and "
        f"{least:+.1f} points."
    )


def document(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Policies that evict experts",
        "",
        "Hit rates in percent: the share of expert uses in the answer that found their expert resident. `belady` "
        "knows the future. Budgets are in token cycles. These are counts of `hoistway moe replay`, the same on every "
        "machine; [docs/moe-replay.md](../../docs/moe-replay.md) says what they mean. "
        f"Made by `just bench-moe-policies`. {results['date']}, commit {results['commit']}.",
        "",
        verdict(results["recorded"]),
        "",
        "## Recorded traces",
    ]
    for case in results["recorded"]:
        lines += ["", f"{case['trace']}. SHA-256 of the trace: `{case['sha256']}`.", ""]
        lines += [
            "| cycles | " + " | ".join(f"`{policy}`" for policy in POLICIES) + " | `ewma2` above `lru` |"
        ]
        lines += ["|" + "---|" * (len(POLICIES) + 2)]
        for budget, rates in by_budget(case).items():
            cells = [f"{budget:g}", *(f"{rates[policy]:.1f}" for policy in POLICIES), f"{gain(rates):+.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Synthetic traces",
        "",
        f"Made by `hoistway moe generate PATTERN {' '.join(COMMON)}`, with other defaults. Experts of the previous "
        "token return with the probability `stay`.",
        "",
        "| pattern | cycles | "
        + " | ".join(f"`{policy}`" for policy in SHORT_POLICIES)
        + " | `ewma2` above `lru` |",
        "|" + "---|" * (len(SHORT_POLICIES) + 3),
    ]
    for case in results["synthetic"]:
        found = by_budget(case)
        for budget in SHORT_BUDGETS:
            name = case["name"] if budget == SHORT_BUDGETS[0] else ""
            rates = found[budget]
            cells = [name, f"{budget:g}", *(f"{rates[policy]:.1f}" for policy in SHORT_POLICIES)]
            lines.append(f"| {' | '.join(cells)} | {gain(rates):+.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replays what the command line names, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="of recorded traces")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="the command `hoistway`")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="of moe-replay.json and .md")
    arguments = parser.parse_args()
    results = measure(arguments.program, arguments.directory)
    (arguments.output / "moe-replay.json").write_text(json.dumps(results, indent=1) + "\n")
    text = document(results)
    (arguments.output / "moe-replay.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
