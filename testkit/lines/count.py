"""Counts code lines of every crate in one way: no blank lines, no comments, no tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Files of tests, and of what only tests use.
TESTS = re.compile(
    r"(^|/)(tests|benches|examples|fuzz)/|(^|/)tests\.rs$|_tests\.rs$|(^|/)(conformance|simulated|fuzzing)\.rs$"
)
INLINE_TESTS = re.compile(r"#\[cfg\(test\)\]\s*\n(pub(\(crate\))? )?mod \w+ \{")


def code_lines(path: Path) -> int:
    """Lines of a file that are code. Tests are at a file's end."""
    text = path.read_text(encoding="utf-8")
    if inline := INLINE_TESTS.search(text):
        text = text[: inline.start()]
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("//"))


def main() -> None:
    """Prints a line for each crate, and the sum."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    total = 0
    for source in sorted([*root.glob("crates/*/src"), *root.glob("python/src")]):
        files = [
            path for path in source.rglob("*.rs") if not TESTS.search(path.relative_to(source).as_posix())
        ]
        count = sum(map(code_lines, files))
        total += count
        print(f"{count:7,}  {source.parent.relative_to(root)}")
    print(f"{total:7,}  all")


if __name__ == "__main__":
    main()
