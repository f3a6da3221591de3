"""What the GPU suite is held against: each target with what was measured, or why it was not."""

from __future__ import annotations

from collections.abc import Callable
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

    def text(self, is_judged: bool) -> str:
        """For people, on one line."""
        goal = f" (goal {self.wanted})" if self.wanted else ""
        figure = f": {self.measured}" if self.measured else ""
        verdict = self.verdict if is_judged or not self.measured else "not judged: stand-in driver"
        return f"{self.what}{figure}{goal}: {verdict}"


@dataclass(frozen=True)
class Comparison:
    """A use of hoistway, and one of its sides as a share of the speed of another."""

    use: str
    own: str
    other: str
    what: str
    wanted: float | None
    """`None` if the figure has no goal."""


COMPARISONS = (
    Comparison("first_load", "first", "second", "first load of a process, of the rate of the second", 0.9),
    Comparison("conversion", "first", "plain", "first conversion of a process, of a plain load", 0.9),
    Comparison("conversion", "later", "plain", "later conversions, of a plain load", 0.9),
    Comparison("pieces", "1MiB", "4MiB", "pieces of 1 MiB, of the rate of 4 MiB", 0.85),
    Comparison("large_model", "load", "link", "a model of twice the size, of pinned copies", 0.95),
    Comparison("largest_model", "load", "link", "a model of four times the size, of pinned copies", 0.95),
    Comparison("one_tensor", "tensor", "link", "one tensor of 16 MiB, of the link's rate", 0.6),
    Comparison(
        "kv_blocks", "store device", "store host", "KV blocks of 64 KiB stored, of the host's rate", 0.9
    ),
    Comparison(
        "kv_blocks", "load device", "load host", "KV blocks of 64 KiB loaded, of the host's rate", 0.9
    ),
    Comparison("save", "save", "writes", "save from the device, of the drive's writes", 0.9),
    Comparison(
        "kv_large_blocks", "store device", "writes", "KV blocks of 1 MiB stored, of the drive's writes", 0.9
    ),
    Comparison("kv_large_blocks", "load device", "reads", "KV blocks of 1 MiB loaded, of direct reads", 0.9),
    Comparison("layers", "layers", "load", "layers one after the other, of a load of all", None),
    Comparison("experts", "experts", "load", "experts as they are chosen, of a load of all", None),
    Comparison("experts", "mapped", "experts", "experts mapped at their stride, of those in slots", None),
    Comparison("second_level", "experts", "link", "experts from the second level, of pinned copies", None),
)


def judged(benchmark: dict[str, Any]) -> list[Line]:
    """All targets."""
    pinned, drive = ("slots", "buffer"), ("drive",)
    return [
        _of_limit(benchmark, "warm", pinned, named="pinned copies", wanted=0.95),
        _of_processors(benchmark, "warm", "cores busy", 4, lambda own: own["cpu_seconds"] / own["seconds"]),
        _of_peer(benchmark, "warm", None, 1.3),
        _of_limit(benchmark, "memory", pinned, named="pinned copies", wanted=0.95),
        _of_processors(benchmark, "memory", "cores busy", 4, lambda own: own["cpu_seconds"] / own["seconds"]),
        _of_peer(benchmark, "memory", "instanttensor", 1.0),
        _of_limit(benchmark, "cold", drive, named="direct reads", wanted=0.95),
        _of_processors(
            benchmark,
            "cold",
            "seconds of processors for a GB",
            0.1,
            lambda own: own["cpu_seconds"] / (benchmark["bytes"] / 1e9),
        ),
        *(_of_use(benchmark, comparison) for comparison in COMPARISONS),
        *(_of_memory(benchmark, case) for case in benchmark["cases"]),
    ]


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


def _of_peer(benchmark: dict[str, Any], case: str, package: str | None, factor: float) -> Line:
    """Against a package, or against whichever is fastest; each at its best setting."""
    named = package or "the fastest other loader"
    what, target = f"{benchmark['cases'][case]}: times as fast as {named}", f"≥ {factor:.1f}"
    own = {result["round"]: result["seconds"] for result in right_results(benchmark, case, OURS)}
    about = benchmark["loaders"]
    names = [
        name
        for name in about
        if not about[name]["is_ours"] and (package is None or about[name]["package"] == package)
    ]
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
    setting = ", ".join([*([] if package else [about[best]["package"]]), about[best]["setting"]])
    return Line(what, target, f"{ratio:.2f} ({setting})", _verdict(ratio >= factor, 1 - ratio / factor))


def _of_processors(
    benchmark: dict[str, Any], case: str, named: str, most: float, value: Callable[[dict[str, Any]], float]
) -> Line:
    what, target = f"{benchmark['cases'][case]}: {named}", f"≤ {most:g}"
    own = right_results(benchmark, case, OURS)
    if not own:
        return _missing(what, target, why_missing(benchmark, case, OURS))
    measured = median(value(result) for result in own)
    return Line(what, target, f"{measured:.2f}", _verdict(measured <= most, measured / most - 1))


def _of_use(benchmark: dict[str, Any], comparison: Comparison) -> Line:
    wanted = comparison.wanted
    target = "" if wanted is None else f"≥ {wanted:.2f}"
    told = benchmark["uses"].get(comparison.use, {"error": "no time was left", "sides": {}})
    own, other = (_rate(told["sides"].get(side, [])) for side in (comparison.own, comparison.other))
    if not own or not other:
        return _missing(comparison.what, target, told["error"] or "it moved no bytes")
    ratio = own / other
    verdict = "measured" if wanted is None else _verdict(ratio >= wanted, 1 - ratio / wanted)
    return Line(comparison.what, target, f"{ratio:.2f} ({own:.2f} of {other:.2f} GB/s)", verdict)


def _rate(side: list[dict[str, Any]]) -> float:
    """In GB/s."""
    return median(each["bytes"] / each["seconds"] for each in side) / 1e9 if side else 0.0


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
    return "met" if is_reached else f"missed by {by:.0%}"


def _missing(what: str, wanted: str, reason: str) -> Line:
    return Line(what, wanted, "", f"not measured: {reason}")
