"""Tables and charts of a benchmark's results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

OURS = "#1f6feb"
PEER = "#8c959f"


def main() -> None:
    """Writes tables and charts of results that were measured before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a JSON file that run.py wrote")
    path = parser.parse_args().results
    write(json.loads(path.read_text()), path.parent)


def write(document: dict[str, Any], output: Path) -> None:
    """Writes `host.md` and `host.svg`."""
    check_checksums(document)
    (output / "host.md").write_text(tables(document))
    chart(document, output / "host.svg")


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
    """Bars of throughput, a panel a case, the limit as a line."""
    cases = [case for case in document["cases"] if document["models"][case] == "large" and case != "mapped"]
    if not cases:
        return
    rows = -(-len(cases) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(12, 3.2 * rows), squeeze=False)
    for axis, case in zip(axes.flat, cases, strict=False):
        size = document["bytes"]["large"]
        names = loaders_of(document, case)[::-1]
        speeds, errors = [], [[], []]
        for name in names:
            found = sorted(size / result["seconds"] / 1e9 for result in of(document, case, loader=name))
            speeds.append(median(found))
            errors[0].append(median(found) - found[0])
            errors[1].append(found[-1] - median(found))
        about = [document["loaders"][name] for name in names]
        colours = [OURS if loader["is_ours"] else PEER for loader in about]
        labels = [f"{loader['package']}, {loader['setting']}" for loader in about]
        axis.barh(labels, speeds, xerr=errors, color=colours, height=0.7, error_kw={"lw": 0.8, "capsize": 2})
        for name, seconds in limit_seconds(document, case).items():
            limit = size / median(seconds) / 1e9
            axis.axvline(limit, color="#cf222e", linestyle="--", linewidth=1)
            # Above the panel, where no bar is in the way.
            place = {
                "transform": axis.get_xaxis_transform(),
                "ha": "center",
                "fontsize": 7,
                "color": "#cf222e",
            }
            axis.text(limit, 1.015, f"{name.removeprefix('memory ')} {limit:.1f}", **place)
        axis.set_title(document["cases"][case]["title"], fontsize=8.5, loc="left", pad=14)
        axis.set_xlabel("GB/s", fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in list(axes.flat)[len(cases) :]:
        axis.axis("off")
    figure.suptitle(f"Loading {document['bytes']['large'] / 1e9:.1f} GB into host memory", fontsize=12)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
