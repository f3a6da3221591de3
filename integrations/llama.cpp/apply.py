#!/usr/bin/env python3
"""Adds hoistway to a source tree of llama.cpp, llama-cpp-python or Ollama.

Needs nothing but Python. A second run changes nothing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATCHES = HERE / "patches"
INCLUDE = HERE.parent.parent / "crates/hoistway-capi/include"
SOURCES = (
    *sorted(HERE.glob("hoistway-*.cpp")),
    *sorted(HERE.glob("hoistway-*.h")),
    INCLUDE / "hoistway.h",
    INCLUDE / "hoistway.hpp",
)
LOADER = "src/llama-model-loader.cpp"
# Ollama's build finds sources by itself.
LIST_OF_SOURCES = "src/CMakeLists.txt"
# After Ollama's own patches, which are applied in the order of their names.
OLLAMA_PATCH = "005-hoistway-weights.patch"


class DoesNotFitError(Exception):
    """A patch or a tree that cannot be used, with the reason."""


def main() -> int:
    """Does what the command line says; 0 if the tree has hoistway now, or could have it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="source tree of llama.cpp, llama-cpp-python or Ollama")
    parser.add_argument("--check", action="store_true", help="only say what would be done")
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="TREE",
        help="for Ollama: the llama.cpp that it builds, to find the patch by its text instead of its version",
    )
    arguments = parser.parse_args()
    try:
        if (arguments.tree / "LLAMA_CPP_VERSION").is_file():
            add_to_ollama(arguments.tree, arguments.llama_cpp, arguments.check)
        else:
            add_to_llama_cpp(arguments.tree, arguments.check)
    except DoesNotFitError as reason:
        print(f"apply.py: {reason}", file=sys.stderr)
        return 1
    return 0


def add_to_llama_cpp(tree: Path, check: bool) -> None:
    """Patches llama.cpp and copies the sources beside its own."""
    if (tree / "vendor/llama.cpp" / LOADER).is_file():
        tree = tree / "vendor/llama.cpp"
    patch, changed = fitting_patch(tree)
    if changed is None:
        print(f"{patch.name}: already applied to {tree}")
    else:
        print(f"{patch.name}: {'fits' if check else 'applied to'} {tree}")
    copy_sources(tree / "src", check)
    if not check:
        for path, text in (changed or {}).items():
            text.write(tree / path)


def add_to_ollama(checkout: Path, llama_cpp: Path | None, check: bool) -> None:
    """Puts sources and patch where Ollama's build looks for them."""
    version = (checkout / "LLAMA_CPP_VERSION").read_text().strip()
    compat = checkout / "llama/compat"
    if not (compat / "compat.cmake").is_file():
        raise DoesNotFitError(f"{checkout} has no llama/compat: this Ollama does not build llama-server")
    if llama_cpp:
        patch, _ = fitting_patch(llama_cpp)
    else:
        patch = PATCHES / f"llama.cpp-{version}.patch"
        if not patch.is_file():
            raise DoesNotFitError(
                f"there is no patch named after llama.cpp {version}, which this Ollama builds; "
                "give its source tree with --llama-cpp, and a patch that fits is looked for"
            )
    sections = re.split(r"(?m)^(?=--- a/)", patch.read_text())
    text = "".join(section for section in sections if not section.startswith(f"--- a/{LIST_OF_SOURCES}"))
    target = compat / OLLAMA_PATCH
    if target.is_file() and target.read_text() == text:
        print(f"{patch.name}: already in {target}")
    else:
        print(f"{patch.name}: {'would be' if check else 'written to'} {target}")
        if not check:
            target.write_text(text, newline="\n")
    copy_sources(compat, check)


def copy_sources(folder: Path, check: bool) -> None:
    """Copies what differs."""
    for source in SOURCES:
        target = folder / source.name
        if target.is_file() and target.read_bytes() == source.read_bytes():
            print(f"{source.name}: already in {folder}")
        else:
            print(f"{source.name}: {'would be copied' if check else 'copied'} to {folder}")
            if not check:
                shutil.copyfile(source, target)


def fitting_patch(tree: Path) -> tuple[Path, dict[str, Text] | None]:
    """The patch that fits a tree, and the files it makes; no files if it is applied already."""
    if not (tree / LOADER).is_file():
        raise DoesNotFitError(f"{tree} is no source tree of llama.cpp: it has no {LOADER}")
    reasons = []
    for patch in sorted(PATCHES.glob("*.patch")):
        hunks = parse(patch.read_text())
        try:
            patched(tree, [hunk.reverse() for hunk in hunks])
            return patch, None
        except DoesNotFitError:
            pass
        try:
            return patch, patched(tree, hunks)
        except DoesNotFitError as reason:
            reasons.append(f"  {patch.name}: {reason}")
    raise DoesNotFitError("\n".join([f"no patch fits {tree}:", *reasons]))


@dataclass(frozen=True)
class Hunk:
    """Lines of a file that are replaced by others."""

    path: str
    line: int
    old: list[str]
    new: list[str]

    def reverse(self) -> Hunk:
        """What undoes it."""
        return Hunk(self.path, self.line, self.new, self.old)


@dataclass(frozen=True)
class Text:
    """A file's lines, and how they end."""

    lines: list[str]
    ending: str

    @classmethod
    def read(cls, path: Path) -> Text:
        """A file as it is."""
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise DoesNotFitError(f"{path} cannot be read: {error.strerror}") from error
        ending = "\r\n" if "\r\n" in text else "\n"
        return cls(text.split(ending), ending)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        path.write_bytes(self.ending.join(self.lines).encode())

    def replaced(self, hunk: Hunk) -> Text:
        """With a hunk's new lines for its old ones, where they are nearest to its line number."""
        size = len(hunk.old)
        places = [at for at in range(len(self.lines)) if self.lines[at : at + size] == hunk.old]
        if not places:
            raise DoesNotFitError(f"{hunk.path} differs from what it expects near line {hunk.line}")
        at = min(places, key=lambda place: abs(place - hunk.line))
        return Text([*self.lines[:at], *hunk.new, *self.lines[at + size :]], self.ending)


def parse(patch: str) -> list[Hunk]:
    """The hunks of a unified diff."""
    hunks: list[Hunk] = []
    path = ""
    for line in patch.splitlines():
        header = re.match(r"@@ -(\d+)", line)
        if line.startswith("--- a/"):
            path = line.removeprefix("--- a/")
        elif line.startswith("+++ b/"):
            continue
        elif header:
            hunks.append(Hunk(path, int(header[1]) - 1, [], []))
        else:
            # A context line that is empty may have lost its blank.
            mark, text = line[:1] or " ", line[1:]
            if mark in " -":
                hunks[-1].old.append(text)
            if mark in " +":
                hunks[-1].new.append(text)
    return hunks


def patched(tree: Path, hunks: list[Hunk]) -> dict[str, Text]:
    """The files that hunks make of those of a tree."""
    texts: dict[str, Text] = {}
    for hunk in hunks:
        texts[hunk.path] = (texts.get(hunk.path) or Text.read(tree / hunk.path)).replaced(hunk)
    return texts


if __name__ == "__main__":
    sys.exit(main())
