"""Lays the project's pages out for mkdocs, as they lie in the repository: their links stay as they are.

Links to files that are no pages, such as sources, become text: the site does not hold them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/README.md",
    "bench/results/*.md",
    "docs/**/*.md",
)
PICTURES = ("bench/results/*.svg",)
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
API = """# Python

What `import hoistway` brings. Everything has types, so editors show it too.

::: hoistway
"""


def main() -> None:
    """Writes the pages to the directory that the command line names."""
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    # Only what is part of the project: a checkout may have other files.
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    files = {PurePosixPath(name) for name in listed.stdout.split("\0") if name}
    pages = {file for file in files if any(matches(file, pattern) for pattern in PAGES)}
    pictures = {file for file in files if any(matches(file, pattern) for pattern in PICTURES)}
    for picture in pictures:
        write(target / picture, (ROOT / picture).read_bytes())
    known = pages | pictures | {PurePosixPath("docs/python-api.md")}
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        write(target / page, prose(text, page, known, files).encode())
    write(target / "docs/python-api.md", API.encode())


def matches(file: PurePosixPath, pattern: str) -> bool:
    """Whether a file is meant by a pattern; ``**`` is any folders, or none."""
    folder, found, name = pattern.partition("/**/")
    if found:
        return PurePosixPath(folder) in file.parents and file.match(name)
    return len(file.parts) == len(PurePosixPath(pattern).parts) and file.match(pattern)


def prose(text: str, page: PurePosixPath, known: set[PurePosixPath], files: set[PurePosixPath]) -> str:
    """Turns links to what is no page into text, outside blocks of code."""
    parts = FENCE.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = LINK.sub(lambda link: replaced(link, page, known, files), parts[index])
    return "".join(parts)


def replaced(
    link: re.Match[str], page: PurePosixPath, known: set[PurePosixPath], files: set[PurePosixPath]
) -> str:
    """A link as the site has it."""
    target = link["target"]
    if ":" in target:
        return link[0]
    meant = resolved(page.parent / target)
    if meant in known:
        return link[0]
    index = meant / "README.md"
    if index in known:
        return f"[{link['text']}]({target.rstrip('/')}/README.md{link['anchor'] or ''})"
    if meant in files or any(meant in file.parents for file in files):
        return link["text"] if str(meant) in link["text"] else f"{link['text']} (`{meant}`)"
    raise SystemExit(f"{page}: nothing is at {target}")


def resolved(path: PurePosixPath) -> PurePosixPath:
    """A path without its ``..``."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            if not parts:
                raise SystemExit(f"{path} leaves the project")
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)


def write(path: Path, content: bytes) -> None:
    """Writes a file, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    main()
