"""What a request for experts takes in a store whose experts are all resident.

The fastest of many rounds counts: other programs on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from host import machine

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "target" / "release" / "examples" / "ensure_hits"
# Microseconds: of a request, and of each expert in it.
GOAL = (1.0, 0.1)


def row(measured: dict[str, Any]) -> str:
    """One number of experts."""
    ensure, release = measured["ensure"], measured["release"]
    goal = GOAL[0] + GOAL[1] * measured["experts"]
    verdict = "reached" if ensure["least"] <= goal else "missed"
    cells = [
        str(measured["experts"]),
        "the caller" if measured["observed"] else "the request",
        f"{ensure['least']:.2f} µs",
        f"{ensure['median']:.2f} µs",
        f"{goal:.1f} µs: {verdict}",
        f"{release['least']:.2f} µs",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "experts-hits.md")
    arguments = parser.parse_args()
    command = [PROGRAM, str(arguments.rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [row(json.loads(line)) for line in done.stdout.splitlines()]
    about = machine(HERE, ())
    text = f"""# Requests for experts that are resident

{about["processor"]}, {about["cores"]} cores, Linux {about["kernel"]}, virtual machine: {about["virtual_machine"]}.
{about["date"]}, commit {about["commit"]}.

A layer of 128 experts that are all resident, one thread, policy `ewma2`. Each of {arguments.rounds} rounds calls
`ensure` 64 times and then drops the leases. `ensure` is the time of a call: that of the fastest round, and the median.
The policy learns of the visit from the caller, by `observe`, or from the request itself. `drop` is that of a lease, in
the fastest round. The goal is {GOAL[0]:g} µs and {GOAL[1]:g} µs for each expert. Made by `just bench-expert-hits`.

| experts | visits are told by | ensure, fastest | median | goal | drop, fastest |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
    arguments.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
