"""How long opening a GGUF file takes, and how much memory: hoistway, ggml's own parser, and the package `gguf`.

Each measurement is a process that has imported what it needs, and the file is cached. A vocabulary is the hard
case: its header is the whole file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "testkit" / "gguf"))
MIB = 1 << 20
GOAL_SECONDS = 0.020
GOAL_BYTES = 32 * MIB
TOKENS = "tokenizer.ggml.tokens"


def main() -> None:
    """Measures what the command line says, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+", help="GGUF files, or directories of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=1, help="rounds of those that take many seconds")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--measure", choices=LOADERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.paths[0])))
        return
    results = []
    for path in largest_first(arguments.paths):
        path.read_bytes()
        for turn in range(arguments.rounds):
            for loader in LOADERS:
                if loader == "gguf" and turn >= arguments.slow_rounds:
                    continue
                command = [sys.executable, __file__, "--measure", loader, str(path)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                result = {"file": path.name, "bytes": path.stat().st_size, "loader": loader}
                results.append(result | json.loads(done.stdout))
                print(f"{path.name:<40} {loader:<16} {results[-1]['seconds'] * 1000:10.1f} ms", flush=True)
    # Not at the top: processes that are measured import no more than they need.
    from host import machine  # noqa: PLC0415

    host = machine(path, ("hoistway", "gguf", "pywhispercpp"))
    document = {"machine": host, "rounds": arguments.rounds, "results": results}
    (arguments.output / "gguf-open.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.output / "gguf-open.md").write_text(report(document))
    print(report(document))


def largest_first(paths: Iterable[Path]) -> list[Path]:
    """The files, also those in directories, by their size."""
    files = [file for path in paths for file in ([*path.glob("*.gguf")] if path.is_dir() else [path])]
    return sorted(files, key=lambda file: -file.stat().st_size)


def hoistway() -> Callable[[Path], Any]:
    """Opening, and the mapping of all keys and values; arrays stay in the file."""
    import hoistway  # noqa: PLC0415

    return lambda path: hoistway.open(path, framework="raw").metadata()


def hoistway_tokens() -> Callable[[Path], Any]:
    """The same, and all tokens as a list of strings."""
    openly = hoistway()

    def load(path: Path) -> Any:
        values = openly(path)
        return values, list(values.get(TOKENS, []))

    return load


def ggml() -> Callable[[Path], Any]:
    """What llama.cpp does first: all keys and values in memory."""
    from oracles import ggml_library  # noqa: PLC0415

    class Parameters(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("tensors", ctypes.c_void_p))

    library = ctypes.CDLL(str(ggml_library()))
    function = library.gguf_init_from_file
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_char_p, Parameters]
    return lambda path: function(str(path).encode(), Parameters(True, None))


def gguf() -> Callable[[Path], Any]:
    """The package's reader: views of every element."""
    import gguf  # noqa: PLC0415

    return gguf.GGUFReader


LOADERS: dict[str, Callable[[], Callable[[Path], Any]]] = {
    "hoistway": hoistway,
    "hoistway-tokens": hoistway_tokens,
    "ggml": ggml,
    "gguf": gguf,
}
TITLES = {
    "hoistway": "hoistway",
    "hoistway-tokens": "hoistway, with a list of all tokens",
    "ggml": "ggml of pywhispercpp {pywhispercpp}, by ctypes",
    "gguf": "gguf {gguf}",
}


def measure(loader: str, path: Path) -> dict[str, float]:
    """Opens a file once, in this process."""
    load = LOADERS[loader]()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # The high-water mark begins again at what is resident now.
    before = status("VmRSS")
    started = time.perf_counter()
    opened = load(path)
    seconds = time.perf_counter() - started
    peak = status("VmHWM")
    assert opened, f"{loader} cannot open {path}"
    return {"seconds": seconds, "rss_bytes": peak, "growth_bytes": peak - before}


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":")) * 1024


def report(document: dict[str, Any]) -> str:
    """The tables."""
    host = document["machine"]
    results = document["results"]
    files = list(dict.fromkeys(result["file"] for result in results))
    largest = [result for result in results if result["file"] == files[0]]
    ours = [result for result in largest if result["loader"] == "hoistway"]
    seconds, resident = median(ours, "seconds"), median(ours, "rss_bytes")
    reached = "reached" if seconds <= GOAL_SECONDS and resident <= GOAL_BYTES else "missed"
    where = f"{host['processor']}, {host['cores']} processors, Linux {host['kernel']}"
    goal = f"{GOAL_SECONDS * 1000:.0f} ms and {GOAL_BYTES // MIB} MiB"
    return f"""# Opening GGUF files

Medians of {document["rounds"]} rounds, in turn, a process each that has imported what it needs; files are cached. The
package `gguf` has fewer rounds, since it takes long. Made by `just test-gguf-vocab` on {host["date"]}:
{where}, Python {host["python"]}.

A process that opens {files[0]}, {largest[0]["bytes"] / 1e6:.1f} MB, should take at most {goal}:
{reached}, with {seconds * 1000:.1f} ms and {resident / MIB:.1f} MiB.

## {files[0]}
{chr(10).join(table(largest, host["packages"]))}

`grown` is what the peak is above what was resident before the file was opened.

## All files, in milliseconds
{chr(10).join(summary(results, files))}
"""


def table(results: list[dict[str, Any]], packages: dict[str, str]) -> Iterator[str]:
    """One file: time and memory of every loader."""
    yield "| | time | resident at most | grown |"
    yield "|---|---|---|---|"
    for loader, title in TITLES.items():
        own = [result for result in results if result["loader"] == loader]
        if not own:
            continue
        times = sorted(result["seconds"] * 1000 for result in own)
        spread = f" ({times[0]:.1f} to {times[-1]:.1f})" if len(times) > 1 else ""
        yield (
            f"| {title.format(**packages)} | {median(own, 'seconds') * 1000:.1f} ms{spread} "
            f"| {median(own, 'rss_bytes') / MIB:.1f} MiB | {median(own, 'growth_bytes') / MIB:.1f} MiB |"
        )


def summary(results: list[dict[str, Any]], files: list[str]) -> Iterator[str]:
    """All files: the time of every loader."""
    loaders = list(dict.fromkeys(result["loader"] for result in results))
    yield f"| file | MB | {' | '.join(loaders)} |"
    yield "|---|---|" + "---|" * len(loaders)
    for name in files:
        own = [result for result in results if result["file"] == name]
        times = (median([r for r in own if r["loader"] == loader], "seconds") * 1000 for loader in loaders)
        yield f"| {name} | {own[0]['bytes'] / 1e6:.1f} | {' | '.join(f'{time:.1f}' for time in times)} |"


def median(results: list[dict[str, Any]], key: str) -> float:
    """The median of what several rounds found."""
    return statistics.median(result[key] for result in results)


if __name__ == "__main__":
    main()
