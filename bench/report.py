"""Tables and charts of a benchmark's results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from bar_chart import drawn
from chart import OURS, PEER, draw


def main() -> None:
    """Writes tables and charts of results that were measured before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a JSON file that run.py wrote")
    path = parser.parse_args().results
    write(json.loads(path.read_text()), path.parent)


def write(document: dict[str, Any], output: Path) -> None:
    """Writes `host.md`, `host.svg`, and `first.svg` of README's first screen."""
    check_checksums(document)
    (output / "host.md").write_text(tables(document))
    chart(document, output / "host.svg")
    (output / "first.svg").write_text(first_chart(document))


def first_chart(document: dict[str, Any], case: str = "cold-fresh") -> str:
    """One bar for each package: hoistway as it comes, the others at their best setting."""
    size = document["bytes"][document["models"][case]]
    rates: dict[str, float] = {}
    for loader, described in document["loaders"].items():
        seconds = [result["seconds"] for result in of(document, case, loader=loader)]
        if seconds and (loader == "hoistway" or not described["is_ours"]):
            package, rate = described["package"], size / median(seconds) / 1e9
            rates[package] = max(rate, rates.get(package, 0.0))
    best_first = dict(sorted(rates.items(), key=lambda named: (named[0] != "hoistway", -named[1])))
    drive = size / median(limit_seconds(document, case)["device"]) / 1e9
    title = f"Loading {size / 1e9:.1f} GB from a drive into memory, GB/s"
    return drawn(title, best_first, ("the drive itself", drive))


def check_checksums(document: dict[str, Any]) -> None:
    """All loaders must have delivered the bytes of the files."""
    for result in document["results"]:
        expected = document["checksums"][document["models"][result["case"]]]
        if "loader" in result and result["checksum"] != expected:
            raise SystemExit(
                f"{result['loader']} delivered other bytes than the files hold: {result['case']}"
            )


def of(document: dict[str, Any], case: str, **wanted: Any) -> list[dict[str, Any]]:
    """Results of a case that have these values."""
    return [
        result
        for result in document["results"]
        if result["case"] == case and all(result.get(key) == value for key, value in wanted.items())
    ]


def limit_seconds(document: dict[str, Any], case: str) -> dict[str, list[float]]:
    """For each limit the seconds of each round; the device's at the depth that is fastest over all rounds."""
    found: dict[str, dict[Any, list[float]]] = {}
    for result in document["results"]:
        if result["case"] == case and "limit" in result:
            found.setdefault(result["limit"], {}).setdefault(result.get("depth"), []).append(
                result["seconds"]
            )
    return {limit: min(depths.values(), key=median) for limit, depths in found.items()}


def tables(document: dict[str, Any]) -> str:
    """All cases as Markdown."""
    machine = document["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        "# Loading into host memory",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {machine['kernel']}, {machine['file_system']}, virtual machine: {machine['virtual_machine']}, "
        f"huge pages: {machine['transparent_huge_pages']}, Python {machine['python']}. {packages}. "
        f"{machine['date']}. Commit {machine['commit']}.",
        "",
        "Medians of all rounds, with the fastest and slowest; loaders ran in turn. `GB/s` is of the model's bytes. "
        "`of device` and `of memory` compare the median with that of the limit, which was measured before each loader "
        "of the same case; `ours is faster` is the median over rounds of a loader's seconds by ours in the same round. "
        "All loaders delivered the files' bytes (checksum of all).",
        "",
        "![GB/s of each loader in six cases](host.svg)",
        "",
    ]
    for case, about in document["cases"].items():
        lines += table(document, case, about["title"])
    return "\n".join(lines)


def table(document: dict[str, Any], case: str, title: str) -> list[str]:
    """One case as Markdown."""
    size = document["bytes"][document["models"][case]]
    rounds = len({result["round"] for result in document["results"] if result["case"] == case})
    lines = [f"## {title}", "", f"{rounds} rounds."]
    limits = limit_seconds(document, case)
    for name, seconds in limits.items():
        spread = f"{size / max(seconds) / 1e9:.2f} to {size / min(seconds) / 1e9:.2f}"
        lines.append(f"Limit of the {name}: {size / median(seconds) / 1e9:.2f} GB/s ({spread}).")
    # Where bytes come from two places at once, neither alone is the limit.
    shown_limits = limits if document["cases"][case]["state"] != "half" else {}
    head = [
        "loader",
        "setting",
        "seconds",
        "GB/s",
        *(f"of {name}" for name in shown_limits),
        "ours is faster",
    ]
    head += ["CPU s", "page faults", "extra RSS MiB", "disk GB"]
    lazy = case == "mapped"
    if lazy:
        head.append("seconds with touching every byte")
    if document["models"][case] == "small":
        head.append("µs a tensor")
    lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    ours = next(name for name in loaders_of(document, case) if document["loaders"][name]["is_ours"])
    ours_seconds = [result["seconds"] for result in of(document, case, loader=ours)]
    for name in loaders_of(document, case):
        about = document["loaders"][name]
        results = of(document, case, loader=name)
        seconds = [result["seconds"] for result in results]
        middle = {
            key: median(result[key] for result in results)
            for key in (
                "cpu_seconds",
                "page_faults",
                "rss_growth_bytes",
                "disk_bytes",
                "touch_seconds",
                "tensors",
            )
        }
        ratios = [other / own for other, own in zip(seconds, ours_seconds, strict=True)]
        shown = f"**{about['package']}**" if about["is_ours"] else about["package"]
        row = [
            shown,
            about["setting"],
            f"{median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})",
            f"{size / median(seconds) / 1e9:.2f}",
            *(f"{median(limit) / median(seconds):.2f}" for limit in shown_limits.values()),
            "" if name == ours else f"{median(ratios):.2f}×",
            f"{middle['cpu_seconds']:.2f}",
            f"{middle['page_faults']:.0f}",
            ""
            if document["cases"][case]["touched"]
            else f"{(middle['rss_growth_bytes'] - size) / 2**20:.0f}",
            f"{middle['disk_bytes'] / 1e9:.2f}",
        ]
        if lazy:
            row.append(f"{median(result['seconds'] + result['touch_seconds'] for result in results):.3f}")
        if document["models"][case] == "small":
            row.append(f"{median(seconds) / middle['tensors'] * 1e6:.1f}")
        lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""]


def loaders_of(document: dict[str, Any], case: str) -> list[str]:
    """The loaders of a case, ours first, in the order of the loaders' list."""
    present = {result["loader"] for result in of(document, case) if "loader" in result}
    return [name for name in document["loaders"] if name in present]


def chart(document: dict[str, Any], path: Path) -> None:
    """Bars of throughput, a panel a case, the limits as lines."""
    cases = [case for case in document["cases"] if document["models"][case] == "large" and case != "mapped"]
    if not cases:
        return
    title = f"Loading {document['bytes']['large'] / 1e9:.1f} GB into host memory"
    draw(path, title, columns=2, scale="own", panels=[panel(document, case) for case in cases])


def panel(document: dict[str, Any], case: str) -> dict[str, Any]:
    """The chart of one case."""
    size = document["bytes"]["large"]
    bars = []
    for name in loaders_of(document, case):
        about = document["loaders"][name]
        speeds = [size / result["seconds"] / 1e9 for result in of(document, case, loader=name)]
        bars.append(
            {
                "label": f"{about['package']}, {about['setting']}",
                "series": OURS if about["is_ours"] else PEER,
                "value": median(speeds),
                "range": [min(speeds), max(speeds)],
            }
        )
    limits = [
        {"label": name.removeprefix("memory "), "value": size / median(seconds) / 1e9}
        for name, seconds in limit_seconds(document, case).items()
    ]
    title = document["cases"][case]["title"]
    return {"bars": {"title": title, "value_name": "GB/s", "bars": bars, "limits": limits}}


if __name__ == "__main__":
    main()
