"""Draws a timeline of ``hoistway load --trace`` as a picture for a page.

python bench/timeline.py timeline.json docs/timeline.svg
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH = 960
LABELS = 190
ROW = 15
COLOURS = {
    "read": "#1f6feb",
    "copy": "#8250df",
    "write": "#8250df",
    "deliver": "#2da44e",
    "wait": "#afb8c1",
    "wait for copies": "#afb8c1",
    "idle": "#eaeef2",
}
OTHERS = "#bf8700"
# Rows of one thread's reads that are drawn.
MOST_ROWS = 8


def main(source: Path, target: Path) -> None:
    """Draws the spans of ``source``."""
    events: list[dict[str, Any]] = json.loads(source.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[names[event["tid"]], event["tid"]].append(event)
    all_slices = [event for row in slices.values() for event in row]
    begin = min(event["ts"] for event in all_slices)
    end = max(event["ts"] + event["dur"] for event in all_slices)
    rows = shown(dict(slices))
    height = 46 + len(rows) * ROW + 26
    scale = (WIDTH - LABELS - 30) / (end - begin)
    parts = [f'<text x="0" y="14">{escape(title(events))}</text>']
    used = sorted(
        {event["name"] for _, row in rows for event in row}, key=lambda name: (name not in COLOURS, name)
    )
    x = 0.0
    for name in used:
        parts.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{COLOURS.get(name, OTHERS)}"/>')
        parts.append(f'<text x="{x + 14}" y="33">{escape(name)}</text>')
        x += 24 + 7 * len(name)
    y = 46
    for label, row in rows:
        parts.append(
            f'<text class="quiet" x="{LABELS - 8}" y="{y + 11}" text-anchor="end">{escape(label)}</text>'
        )
        # Outer spans first: inner ones lie on them.
        for event in sorted(row, key=lambda event: -event["dur"]):
            left = LABELS + (event["ts"] - begin) * scale
            width = max(event["dur"] * scale - 0.3, 0.4)
            colour = COLOURS.get(event["name"], OTHERS)
            parts.append(
                f'<rect x="{left:.2f}" y="{y + 1}" width="{width:.2f}" height="{ROW - 3}" fill="{colour}"/>'
            )
        y += ROW
    for tenth in range(0, 11, 2):
        x = LABELS + (end - begin) * scale * tenth / 10
        text = f"{(end - begin) * tenth / 10 / 1000:.0f} ms"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="44" y2="{y}"/>')
        parts.append(f'<text class="quiet" x="{x:.1f}" y="{y + 16}" text-anchor="middle">{text}</text>')
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}">\n'
        "<style>text { font: 12px system-ui, sans-serif; fill: #24292f } .quiet { fill: #57606a }\n"
        "line { stroke: #57606a; stroke-width: .5; stroke-dasharray: 2 3 }\n"
        "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .quiet { fill: #9da7b1 } }</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def shown(slices: dict[tuple[str, int], list[dict[str, Any]]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows in the order of their threads, each thread's own first, then what it has in flight."""
    rows = []
    threads = [key for key in slices if ": " not in key[0]]
    owners = {name.partition(": ")[0] for name, _ in slices if ": " in name}
    tracks = owners - {f"{name} {tid}" for name, tid in threads}
    for name, tid in sorted(threads, key=lambda key: key[1]):
        rows.append((f"{name} {tid}", slices[name, tid]))
        rows += beside(slices, f"{name} {tid}")
    for track in sorted(tracks):
        rows += beside(slices, track)
    return rows


def beside(
    slices: dict[tuple[str, int], list[dict[str, Any]]], owner: str
) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows beside a thread or a track."""
    own = sorted(
        ((name, tid) for name, tid in slices if name.partition(": ")[0] == owner and ": " in name),
        key=lambda key: key[1],
    )
    rows = [(f"in flight: {name.partition(': ')[2]}", slices[name, tid]) for name, tid in own[:MOST_ROWS]]
    if len(own) > MOST_ROWS:
        rows.append((f"and {len(own) - MOST_ROWS} more rows", []))
    return rows


def title(events: list[dict[str, Any]]) -> str:
    """What was loaded."""
    transfers = [event for event in events if event["name"] == "transfer"]
    bytes_read = sum(event["args"]["bytes"] for event in transfers)
    return f"A load of {bytes_read / 1e6:.0f} MB" if transfers else "A timeline"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
