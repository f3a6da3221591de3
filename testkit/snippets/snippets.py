"""The Python in the pages, as modules: one a page, each line at its number in the page.

A comment above a block says what the page does not show::

    <!-- snippet
    parameter = torch.empty(64)
    -->
    <!-- snippet: needs a GPU -->

The first is code that comes before the block. The second says what a machine may lack: `test_snippets.py` puts
something in its place, or lists the block with the reason why it does not run.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/**/*.md", "bench/*.md")
BLOCK = re.compile(
    r"(?:^<!-- snippet(?P<note>:[^\n]*?)? ?(?:\n(?P<before>.*?))?-->\n)?^```python\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def main() -> None:
    """Writes the modules, for type checkers, to the folder that the command line names."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in pages():
        name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
        (folder / f"{name}.py").write_text(module(page))


def pages() -> list[Path]:
    """The pages that have Python."""
    found = (page for pattern in PAGES for page in sorted(ROOT.glob(pattern)))
    return [page for page in found if BLOCK.search(page.read_text(encoding="utf-8"))]


class Need(NamedTuple):
    """What a block of a page needs."""

    page: Path
    line: int
    what: str


def needs() -> Iterator[Need]:
    """The needs of all blocks that have any."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if what := _need(block):
                yield Need(page, text.count("\n", 0, block.start()) + 1, what)


def module(page: Path, *, lacks: Collection[str] = ()) -> str:
    """The code of a page, without the blocks that need what the machine lacks."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if _need(block) in lacks:
            continue
        for part in ("before", "shown"):
            if block[part]:
                start = text.count("\n", 0, block.start(part))
                code = block[part].rstrip("\n").split("\n")
                lines[start : start + len(code)] = code
    # Pages use a name again for another thing. Their first line is a title.
    lines[0] = "# mypy: allow-redefinition"
    return "\n".join(lines).rstrip("\n") + "\n"


def _need(block: re.Match[str]) -> str:
    return (block["note"] or "").strip().removeprefix(":").strip().removeprefix("needs ")


if __name__ == "__main__":
    main()
