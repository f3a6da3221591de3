"""The results as Markdown."""

from __future__ import annotations

from statistics import median
from typing import Any

from bar_chart import drawn

from gpu import targets
from gpu.targets import MIB, host_extra_bytes, is_in_state, right_results, seconds_by_setting

LIMITS = {
    "slots": "Pinned copies to the device, 8 slots of 4 MiB",
    "buffer": "Pinned copies to the device, one buffer",
    "cache": "Files to pinned memory, on all cores",
    "drive": "Direct reads of the drive",
    "gds": "Drive to the device by cuFile",
}

# Whose reports are shown; all of them are in the JSON file.
REPORTED = ("hoistway", "hoistway_gds")


def markdown(document: dict[str, Any]) -> str:
    """Everything that people want to read."""
    lines = [f"# {document['title']}", ""]
    if document["stand_in"]:
        lines += ["**stand-in driver: no GPU was used. Times say nothing, and no target is judged.**", ""]
    lines += [_machine(document["machine"]), ""]
    if document["problems"]:
        lines += ["Missing here:", "", *(f"* {problem}" for problem in document["problems"]), ""]
    if document.get("correctness") is not None:
        lines += _correctness(document["correctness"])
    if document.get("benchmark") is not None:
        lines += _benchmark(document["benchmark"], document["stand_in"])
    return "\n".join(lines).rstrip("\n") + "\n"


def chart(document: dict[str, Any]) -> str | None:
    """A bar for each package that loads from the page cache: hoistway as it comes, the others at their best setting."""
    benchmark, case = document["benchmark"], "warm"
    rates: dict[str, float] = {}
    for name, about in benchmark["loaders"].items():
        seconds = [result["seconds"] for result in right_results(benchmark, case, name)]
        if seconds and (name == targets.OURS or not about["is_ours"]):
            package, rate = about["package"], benchmark["bytes"] / median(seconds) / 1e9
            rates[package] = max(rate, rates.get(package, 0.0))
    limits = [
        benchmark["bytes"] / median(seconds) / 1e9
        for limit in ("slots", "buffer")
        for seconds in seconds_by_setting(benchmark, case, limit).values()
    ]
    if "hoistway" not in rates or not limits:
        return None
    best_first = dict(sorted(rates.items(), key=lambda named: (named[0] != "hoistway", -named[1])))
    gpu = " ".join(document["machine"]["gpu"]["name"].split()[:2])
    title = f"{benchmark['bytes'] / 1e9:.1f} GB from the page cache to an {gpu}, GB/s"
    return drawn(title, best_first, ("the link", max(limits)))


def _machine(machine: dict[str, Any]) -> str:
    gpu = machine["gpu"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    systems = ", ".join(f"{folder}: {system}" for folder, system in machine["file_systems"].items())
    return (
        f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['vendor']} {gpu['version']} "
        f"(driver, PCIe generation, lanes: {gpu['driver, PCIe generation, lanes']}; "
        f"nvidia-fs: {'yes' if gpu['nvidia_fs'] else 'no'}); "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {machine['kernel']}, virtual machine: {machine['virtual_machine']}; {systems}; "
        f"Python {machine['python']}. {packages}. {machine['date']}. Commit {machine['commit']}."
    )


def _correctness(checks: list[dict[str, Any]]) -> list[str]:
    count = {
        outcome: sum(check["outcome"] == outcome for check in checks) for outcome in ("pass", "fail", "skip")
    }
    lines = [
        "## Correctness",
        "",
        f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped.",
        "",
    ]
    lines += ["| check | outcome | seconds | |", "|---|---|---|---|"]
    for check in checks:
        outcome = {"pass": "pass", "fail": "**FAIL**", "skip": "skip"}[check["outcome"]]
        lines.append(f"| {check['name']} | {outcome} | {check['seconds']:.1f} | {_cell(check['reason'])} |")
    return [*lines, ""]


def _benchmark(benchmark: dict[str, Any], is_stand_in: bool) -> list[str]:
    lines = ["## Targets", ""]
    judged = targets.judged(benchmark)
    lines += ["| | goal | measured | |", "|---|---|---|---|"]
    for row in judged:
        verdict = "not judged" if is_stand_in and row.measured else _cell(row.verdict)
        lines.append(f"| {row.what} | {row.wanted} | {_cell(row.measured)} | {verdict} |")
    lines.append("")
    lines += [
        "Medians of the rounds, with the fastest and slowest. Ratios to limits compare medians; `ours is faster` is",
        "the median over rounds of a loader's seconds by those of hoistway in the same round; a peer counts for the",
        "targets at its best setting. Extra host memory is what became resident beyond what was before the first",
        "load, or the staging that the report admits, if that is more. The rest is of a load of its own, after that of",
        "the first round, as to watch it takes locks that loads need: `less available` is by how much the machine's",
        "available memory sank, which also shows pinned memory that is not resident. Extra device memory is what was",
        "taken at once beyond the model. Each load that counts delivered the files' bytes (checksum of all, after the",
        "clock).",
        "",
    ]
    for case, title in benchmark["cases"].items():
        lines += _case(benchmark, case, title)
    return lines + _missing(benchmark)


def _case(benchmark: dict[str, Any], case: str, title: str) -> list[str]:
    size = benchmark["bytes"]
    lines = [f"## {title}", ""]
    fastest: dict[str, float] = {}
    for limit, named in LIMITS.items():
        for setting, seconds in seconds_by_setting(benchmark, case, limit).items():
            depth = setting.removeprefix(limit).strip()
            depth = f", {depth} of 4 MiB at a time" if depth else ""
            lines.append(
                f"* {named}{depth}: {size / median(seconds) / 1e9:.2f} GB/s ({_spread(size, seconds)})"
            )
            kind = "pinned" if limit in ("slots", "buffer") else limit
            fastest[kind] = min(fastest.get(kind, float("inf")), median(seconds))
    heads = {"pinned": "of pinned copies", "drive": "of direct reads", "gds": "of cuFile"}
    against = [kind for kind in heads if kind in fastest]
    head = [
        "loader",
        "setting",
        "rounds",
        "seconds",
        "GB/s",
        *(heads[kind] for kind in against),
        "ours is faster",
    ]
    head += ["CPU s", "extra host MiB", "less available MiB", "extra device MiB", "read from the drive GB"]
    lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    ours = {result["round"]: result["seconds"] for result in right_results(benchmark, case, targets.OURS)}
    for name, about in benchmark["loaders"].items():
        results = right_results(benchmark, case, name)
        if not results:
            continue
        seconds = [result["seconds"] for result in results]
        ratios = [
            r["seconds"] / ours[r["round"]] for r in results if r["round"] in ours and name != targets.OURS
        ]
        row = [
            f"**{about['package']}**" if about["is_ours"] else about["package"],
            about["setting"],
            f"{len(results)}",
            f"{median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})",
            f"{size / median(seconds) / 1e9:.2f}",
            *(f"{fastest[kind] / median(seconds):.2f}" for kind in against),
            f"{median(ratios):.2f}×" if ratios else "",
            f"{median(result['cpu_seconds'] for result in results):.2f}",
            _middle([host_extra_bytes(result) for result in results], MIB, 0),
            _middle([result.get("available_drop_bytes") for result in results], MIB, 0),
            _middle([result.get("device_extra_bytes") for result in results], MIB, 0),
            _middle([result["disk_bytes"] for result in results], 1e9, 2),
        ]
        lines.append("| " + " | ".join(row) + " |")
    lines.append("")
    last = {
        result["loader"]: result["report_text"]
        for result in benchmark["results"]
        if result["case"] == case and result.get("loader") in REPORTED
    }
    if last:
        lines += ["What hoistway reported, each time of the last round:", "", "```"]
        for name, text in last.items():
            lines += [f"{benchmark['loaders'][name]['setting']}: {text}"]
        lines += ["```", ""]
    return lines


def _missing(benchmark: dict[str, Any]) -> list[str]:
    rows = []
    for case, reasons in benchmark["unavailable"].items():
        rows += [(case, name, reason["reason"]) for name, reason in reasons.items()]
    for result in benchmark["results"]:
        if "loader" not in result:
            continue
        what = f"{result['loader']}, round {result['round'] + 1}"
        if not result["is_right"]:
            rows.append(
                (result["case"], what, "**delivered other bytes than the files hold**: does not count")
            )
        elif not is_in_state(result):
            cached = result["cached_before"]
            how = "an unknown part" if cached is None else f"{cached:.1%}"
            rows.append((result["case"], what, f"{how} of the files was cached before: does not count"))
    rows += [
        (skip["case"], f"{skip['what']}, round {skip['round'] + 1}", "no time was left")
        for skip in benchmark["skipped"]
    ]
    if not rows:
        return []
    lines = ["## Not measured", "", "| case | what | why |", "|---|---|---|"]
    return [*lines, *(f"| {case} | {what} | {_cell(why)} |" for case, what, why in rows), ""]


def _spread(size: int, seconds: list[float]) -> str:
    return f"{size / max(seconds) / 1e9:.2f} to {size / min(seconds) / 1e9:.2f}"


def _middle(values: list[int | None], unit: float, digits: int) -> str:
    known = [value for value in values if value is not None]
    # Adding nothing makes of a negative nothing a plain one.
    return f"{round(median(known) / unit, digits) + 0.0:.{digits}f}" if known else "unknown"


def _cell(text: str) -> str:
    """Text on one line, without what would end a cell."""
    return " ".join(text.split()).replace("|", "\\|")
