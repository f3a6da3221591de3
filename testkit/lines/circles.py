"""Finds files of one folder that name each other in a circle: `circles.py FOLDER…`.

A file is understood without those that use it.
"""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from count import INLINE_TESTS

COMMENT = re.compile(r"//.*")
# What follows `super::`: a name, or a group of paths.
NAMED = re.compile(r"\bsuper::(?:(\w+)|\{((?:[^{}]|\{[^{}]*\})*)\})")
INNER_GROUP = re.compile(r"::\{[^{}]*\}")
EXPORT = re.compile(r"\bpub(?:\([^)]*\))? use (\w+)::(?:(\w+)|\{([^{}]*)\})")


def code(path: Path) -> str:
    """The code of a file, without comments and tests."""
    text = path.read_text(encoding="utf-8")
    inline = INLINE_TESTS.search(text)
    return COMMENT.sub("", text[: inline.start()] if inline else text)


def names(folder: Path) -> dict[str, set[str]]:
    """For each file of a folder, the others that it names, also by what the folder's `mod.rs` exports of them."""
    files = {path.stem: code(path) for path in folder.glob("*.rs") if path.stem != "mod"}
    home = {}
    for module, name, group in EXPORT.findall(code(folder / "mod.rs")):
        home |= dict.fromkeys(re.findall(r"\w+", name or group), module)
    named = {}
    for file, text in files.items():
        paths = [
            path
            for name, group in NAMED.findall(text)
            for path in (name or INNER_GROUP.sub("", group)).split(",")
        ]
        firsts = {match[0] for path in paths if (match := re.search(r"\w+", path))}
        named[file] = ({home.get(name, name) for name in firsts} & files.keys()) - {file}
    return named


def main() -> int:
    """Prints a line for each folder that has a circle."""
    found = 0
    for folder in map(Path, sys.argv[1:]):
        try:
            TopologicalSorter(names(folder)).prepare()
        except CycleError as circle:
            print(f"{folder}: {' names '.join(reversed(circle.args[1]))}")
            found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
