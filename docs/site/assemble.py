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
PICTURES = ("bench/results/*.svg", "docs/*.svg")
FENCE = re.compile(r"^( *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->$", re.MULTILINE | re.DOTALL)
TAB = re.compile(r"^\*\*(.+)\*\*$", re.MULTILINE)
ITEM = re.compile(r"(?:[*-]|\d+\.) +(?=\S)")
# What begins a list within a paragraph: other numbers are the text's own.
FIRST_ITEM = re.compile(r"(?:[*-]|1\.) ")
BAR_CHARTS = re.compile(r"^!\[[^\]]*\]\((bench/results/(?:first|gpu-third)\.svg)\)$", re.MULTILINE)
# What the pages look like; beside this file.
LOOK = ("logo.svg", "style.css")

# In the order of use: a title and what it holds.
SECTIONS = (
    ("Load", ["load_file", "LoadedTensors", "iter_tensors", "load"]),
    ("Open", ["Checkpoint", "TensorSlice", "TensorStream", "Tensor", "MetadataArray"]),
    ("Options", ["LoadOptions", "StoreOptions", "MemoryPool"]),
    ("Reports", ["Report", "Carrier", "Refusal", "trace"]),
    ("Save", ["save_file", "save_sharded", "save", "SaveReport"]),
    ("The machine", ["doctor", "Checks", "memory_limits", "MemoryLimit", "release_devices"]),
    ("Metrics", ["metrics", "MetricsCollector"]),
    ("Read on request", ["Reader", "Reading", "ReaderOptions", "stream_layers", "LayerStream", "Layer"]),
)
MODULES = (
    (
        "Drop-in replacement for safetensors",
        "hoistway.compat.safetensors",
        ["install", "uninstall", "Installation", "reports", "last_report"],
    ),
    (
        "Many ranks",
        "hoistway.distributed",
        [
            *("load_file", "iter_tensors", "DistributedTensors", "TensorIterator", "DistributedReport"),
            *("tensor_parallel", "expert_parallel", "pipeline_range"),
        ],
    ),
    (
        "3FS",
        "hoistway.compat.threefs",
        [
            *("create_reader", "ThreeFSFileReader", "MockFileReader", "FileReaderInterface"),
            *("extract_mount_point", "is_available", "get_backend", "get_hf3fs_lib_path"),
        ],
    ),
    (
        "KV-cache blocks",
        "hoistway.kv",
        ["Store", "Namespace", "Ticket", "Completion", "Pins", "Region", "Addresses", "MetricsCollector"],
    ),
    (
        "Experts larger than memory",
        "hoistway.experts",
        [
            *(
                "ExpertStore",
                "Ticket",
                "Lease",
                "LeasedExpert",
                "LeasedTensors",
                "ResidencyEvent",
                "policies",
            ),
            *("ExpertCatalog", "ExpertLayer", "Rows", "TraceWriter"),
        ],
    ),
    ("Experts of transformers", "hoistway.experts.transformers", ["from_pretrained", "record"]),
    ("Errors", "hoistway.errors", None),
)


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
        if page.match("bench/results/*"):
            # Room for wide tables.
            text = f"---\nhide: [toc]\n---\n\n{text}"
        write(target / page, prose(text, page, known, files).encode())
    write(target / "docs/python-api.md", reference().encode())
    for name in LOOK:
        write(target / "look" / name, (ROOT / "docs/site" / name).read_bytes())


def reference() -> str:
    """The page with the Python package, for mkdocstrings to fill."""
    lines = ["# Python reference", "", "`hoistway.open` is the class `Checkpoint`.", ""]
    for title, names in SECTIONS:
        lines += [f"## {title}", "", *(f"::: hoistway.{name}\n" for name in names)]
    for title, module, members in MODULES:
        lines += [
            f"## {title}: `{module}`",
            "",
            f"::: {module}",
            "    options:",
            "      show_root_heading: false",
        ]
        if members is not None:
            lines.append(f"      members: {members}")
        lines.append("")
    return "\n".join(lines)


def matches(file: PurePosixPath, pattern: str) -> bool:
    """Whether a file is meant by a pattern; ``**`` is any folders, or none."""
    folder, found, name = pattern.partition("/**/")
    if found:
        return PurePosixPath(folder) in file.parents and file.match(name)
    return len(file.parts) == len(PurePosixPath(pattern).parts) and file.match(pattern)


def prose(text: str, page: PurePosixPath, known: set[PurePosixPath], files: set[PurePosixPath]) -> str:
    """Turns links to what is no page into text, outside blocks of code; and the first screen into the site's."""
    text = lists(text)
    text = BAR_CHARTS.sub(lambda chart: inlined(chart[1]), text)
    text = TABS.sub(lambda region: tabs(region[1]), text)
    parts = FENCE.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = LINK.sub(lambda link: replaced(link, page, known, files), parts[index])
    return "".join(parts)


def lists(text: str) -> str:
    """Lists as Python-Markdown wants them: after a blank line, and four blanks before what belongs to an item."""
    lines: list[str] = []
    width = 0
    has_parts = is_code = False
    for line in text.split("\n"):
        is_fence = line.lstrip().startswith("```")
        if is_code:
            is_code = not is_fence
        else:
            is_code = is_fence
            before = lines[-1].strip() if lines else ""
            item = ITEM.match(line)
            if item and (width > 0 or not before or FIRST_ITEM.match(line)):
                if before and (width == 0 or has_parts):
                    lines.append("")
                width, has_parts = len(item[0]), False
            elif not line:
                has_parts = True
            elif not line.startswith(" ") and (not before or line.startswith(("#", "|", "```"))):
                width = 0
        is_inside = width > 0 and line.startswith(" " * width)
        lines.append(" " * 4 + line[width:] if is_inside else line)
    return "\n".join(lines)


def inlined(chart: str) -> str:
    """A chart in the page itself, so that the site's style gives it the page's colours."""
    svg = re.sub(r"<style>.*?</style>", "", (ROOT / chart).read_text(encoding="utf-8"), flags=re.DOTALL)
    return f"<figure>{''.join(line.strip() for line in svg.splitlines())}</figure>"


def tabs(region: str) -> str:
    """Tabs, each under its name in bold."""
    _, *named = TAB.split(region)
    lines = []
    for name, content in zip(named[::2], named[1::2], strict=True):
        lines += [f'=== "{name}"', "", *(f"    {line}".rstrip() for line in content.strip().splitlines()), ""]
    return "\n".join(lines)


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
        if link["text"].strip("`") == meant.name:
            return f"`{meant}`"
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
