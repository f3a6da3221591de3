"""What the GPU suite is held against: each target with what was measured, or why it was not."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

MIB = 1 << 20
OURS = "hoistway"


@dataclass(frozen=True)
class Line:
    """One target's line."""

    what: str
    wanted: str
    measured: str
    verdict: str


def judged(benchmark: dict[str, Any]) -> list[Line]:
    """All targets."""
    pinned, drive = ("slots", "buffer"), ("drive",)
    lines = [
        _of_limit(benchmark, "warm", pinned, named="pinned copies", wanted=0.9),
        _of_limit(benchmark, "memory", pinned, named="pinned copies", wanted=0.9),
        _of_limit(benchmark, "cold", drive, named="direct reads", wanted=0.95),
    ]
    for package, factor in (("fastsafetensors", 2.0), ("instanttensor", 1.2), ("runai-model-streamer", 1.2)):
        lines += [_of_peer(benchmark, case, package, factor) for case in benchmark["cases"]]
    return lines + [_of_memory(benchmark, case) for case in benchmark["cases"]]


def seconds_by_setting(benchmark: dict[str, Any], case: str, limit: str) -> dict[str, list[float]]:
    """Seconds of a limit in each of its settings."""
    found: dict[str, list[float]] = {}
    for result in benchmark["results"]:
        if result["case"] == case and result.get("limit") == limit:
            found.setdefault(result["setting"], []).append(result["seconds"])
    return found


def right_results(benchmark: dict[str, Any], case: str, loader: str) -> list[dict[str, Any]]:
    """A loader's measurements that count: right bytes, from files in the state that the case is about."""
    return [
        result
        for result in benchmark["results"]
        if result["case"] == case
        and result.get("loader") == loader
        and result["is_right"]
        and is_in_state(result)
    ]


def is_in_state(result: dict[str, Any]) -> bool:
    """Whether the files were as the case says, as far as the kernel says what is cached."""
    cached = result["cached_before"]
    if result["case"] == "cold":
        return cached is not None and cached <= 0.02
    return cached is None or cached >= 0.98


def why_missing(benchmark: dict[str, Any], case: str, what: str) -> str:
    """Why there is no figure."""
    unavailable = benchmark["unavailable"].get(case, {}).get(what)
    if unavailable is not None:
        return unavailable["reason"]
    own = [r for r in benchmark["results"] if r["case"] == case and what in (r.get("loader"), r.get("limit"))]
    if any(result.get("is_right") is False for result in own):
        return "it delivered other bytes than the files hold"
    if own:
        return "the files were not in the state that the case is about, or the kernel does not say so"
    return "no time was left" if benchmark["skipped"] else "it was not part of this case"


def _of_limit(
    benchmark: dict[str, Any], case: str, limits: tuple[str, ...], *, named: str, wanted: float
) -> Line:
    what, target = f"{benchmark['cases'][case]}: of the rate of {named}", f"≥ {wanted:.2f}"
    own = right_results(benchmark, case, OURS)
    settings = [s for limit in limits for s in seconds_by_setting(benchmark, case, limit).values()]
    if not own or not settings:
        return _missing(what, target, why_missing(benchmark, case, limits[0] if own else OURS))
    # The setting that is fastest over all rounds.
    ratio = min(median(seconds) for seconds in settings) / median(result["seconds"] for result in own)
    return Line(what, target, f"{ratio:.2f}", _verdict(ratio >= wanted, 1 - ratio / wanted))


def _of_peer(benchmark: dict[str, Any], case: str, package: str, factor: float) -> Line:
    what, target = f"{benchmark['cases'][case]}: times as fast as {package}", f"≥ {factor:.1f}"
    own = {result["round"]: result["seconds"] for result in right_results(benchmark, case, OURS)}
    names = [name for name, about in benchmark["loaders"].items() if about["package"] == package]
    settings = {}
    for name in names:
        seconds = {
            r["round"]: r["seconds"] for r in right_results(benchmark, case, name) if r["round"] in own
        }
        if seconds:
            settings[name] = seconds
    if not settings:
        return _missing(what, target, why_missing(benchmark, case, names[0] if own else OURS))
    best = min(settings, key=lambda name: median(settings[name].values()))
    ratio = median(seconds / own[turn] for turn, seconds in settings[best].items())
    setting = benchmark["loaders"][best]["setting"]
    return Line(what, target, f"{ratio:.2f} ({setting})", _verdict(ratio >= factor, 1 - ratio / factor))


def _of_memory(benchmark: dict[str, Any], case: str) -> Line:
    what, target = f"{benchmark['cases'][case]}: extra host memory", "≤ 256 MiB"
    own = right_results(benchmark, case, OURS)
    measured = [host_extra_bytes(result) for result in own]
    known = [size for size in measured if size is not None]
    if not known:
        reason = "the kernel has no high-water mark to reset" if own else why_missing(benchmark, case, OURS)
        return _missing(what, target, reason)
    worst = max(known)
    return Line(
        what, target, f"{worst / MIB:.0f} MiB at most", _verdict(worst <= 256 * MIB, worst / (256 * MIB) - 1)
    )


def host_extra_bytes(result: dict[str, Any]) -> int | None:
    """Host memory of a load: what became resident, or the staging that our report admits, if that is more. Pages of the
    page cache that were pinned where they lie become resident too, and are no memory of the load's.
    """
    if result["rss_growth_bytes"] is None:
        return None
    report = result.get("report", {})
    admitted = report.get("memory", {}).get("staging_bytes", 0)
    carriers = report.get("carriers", [])
    shown = sum(own["read_bytes"] for own in carriers if own["route"] == "pinned-cache")
    return max(result["rss_growth_bytes"] - shown, admitted)


def _verdict(is_reached: bool, by: float) -> str:
    return "reached" if is_reached else f"missed by {by:.0%}"


def _missing(what: str, wanted: str, reason: str) -> Line:
    return Line(what, wanted, "", f"not measured: {reason}")
