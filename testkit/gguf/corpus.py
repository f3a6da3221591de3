"""Makes the corpus of GGUF files, `testkit/corpus/gguf.json`: good ones, odd ones, and ones that lie.

Run it to write the file again. Each case says what hoistway makes of it, strictly and leniently, and what other parsers
make of it where they differ, and why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from case import Case
from differences import differences
from headers import header_cases
from sets import set_cases
from tensors import tensor_cases

PATH = Path(__file__).parents[1] / "corpus" / "gguf.json"


def main() -> None:
    """Writes the corpus."""
    PATH.write_text(text())


def text() -> str:
    """The corpus as it is kept, a line for each case."""
    cases = [*tensor_cases(), *header_cases(), *set_cases()]
    others = differences({case.name for case in cases})
    assert len({case.name for case in cases}) == len(cases), "two cases have the same name"
    return "[\n" + ",\n".join(json.dumps(as_json(case, others.get(case.name))) for case in cases) + "\n]\n"


def as_json(case: Case, others: dict[str, dict[str, str]] | None) -> dict[str, Any]:
    """A case as it is kept; the corpus's README says what the fields mean."""
    document: dict[str, Any] = {"name": case.name, "error": case.error}
    if case.lenient != case.error:
        document["lenient"] = case.lenient
    document["open"] = case.open
    document["files"] = {name: list(parts(data)) for name, data in case.files.items()}
    if case.offset:
        document["offset"] = case.offset
    if case.tensors is not None:
        document["tensors"] = case.tensors
    if others:
        document["others"] = others
    return document


def parts(data: bytes) -> Iterator[str | tuple[str, int]]:
    """Bytes as hexadecimal text, and as such text with a number of repetitions."""
    end = 0
    repeated = re.compile(rb"(.{1,24}?)\1{15}", re.DOTALL)
    while found := repeated.search(data, end):
        if found.start() > end:
            yield data[end : found.start()].hex()
        times = repetitions(data, found[1], found.start())
        yield found[1].hex(), times
        end = found.start() + times * len(found[1])
    if end < len(data):
        yield data[end:].hex()


def repetitions(data: bytes, part: bytes, start: int) -> int:
    """How often a part is repeated from a place on."""
    times, step = 0, 1 << 20
    while step:
        while data.startswith(part * step, start + times * len(part)):
            times += step
        step //= 2
    return times


if __name__ == "__main__":
    main()
