"""Prints the copyright and the licenses of the crates that a package is linked with, as Debian writes them (DEP 5).

Usage: ``notices.py PACKAGE TARGET``. The crates are those that ``cargo tree`` names; with them come Rust's standard
library and, for Linux, what Zig links. Their texts come with them. Fails if one has no text and none is supplied here.
"""

from __future__ import annotations

import html
import importlib.util
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = re.compile(r"(licen[cs]e|copying|notice|copyright|unlicense)", re.IGNORECASE)
CODE = {".c", ".h", ".py", ".rs", ".S"}
# A line of who holds the copyright, and none of the license's own that speak of it.
HOLDER = re.compile(
    r"^\W*(copyright\s+(?:\(c\)\s+|©\s*|\d)(?![\[{<]).*[^\W_].*)$", re.IGNORECASE | re.MULTILINE
)
# The Apache License, with what its appendix says of how to apply it.
APACHE = re.compile(
    r"^[ \t]*Apache License\s+Version 2\.0, January 2004.*?END OF TERMS AND CONDITIONS"
    r"(?:\s*APPENDIX: How to apply.*?limitations under the License\.)?",
    re.DOTALL | re.MULTILINE,
)
# What a text of a license says, whichever it is.
GRANT = re.compile(
    r"permission\s+is\s+(?:hereby\s+)?granted|permission\s+to\s+use|redistribution\s+and\s+use|apache\s+license|"
    r"free\s+and\s+unencumbered|creative\s+commons|unicode\s+license|mozilla\s+public|boost\s+software",
    re.IGNORECASE,
)
MIT = """MIT License

Copyright (c) {holders}

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE."""
# Crates under the MIT License alone whose file with its text leads out of them.
SUPPLIED = {"plotters": MIT, "plotters-backend": MIT, "plotters-svg": MIT}


def main(package: str, target: str) -> None:
    """Prints a paragraph for each text, with the crates that have it."""
    groups: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = defaultdict(list)
    lacking = []
    for crate in linked(package, target):
        found = tuple(texts(crate))
        if not crate["license"] or not any(GRANT.search(text) for text in found):
            lacking.append(f"{crate['name']}-{crate['version']}")
        groups[crate["license"], found].append(crate)
    if lacking:
        sys.exit(
            f"no license, or no text of it: {', '.join(lacking)}; supply the text in packaging/notices.py"
        )
    for (license_name, found), crates in sorted(groups.items(), key=lambda group: group[1][0]["name"]):
        print("\n".join(paragraph(license_name, found, crates)), end="\n\n")
    print("\n".join(standard_library()))
    if "-linux-" in target:
        print()
        print("\n".join(linked_by_zig()))


def linked(package: str, target: str) -> Iterator[dict[str, Any]]:
    """What cargo knows of the crates of others that are linked, by name."""
    tree = cargo(
        "tree",
        "--package",
        package,
        "--edges",
        "normal",
        "--target",
        target,
        "--prefix",
        "none",
        "--format",
        "{p}",
    )
    named = {tuple(line.split()[:2]) for line in tree.splitlines() if line.strip()}
    known = json.loads(cargo("metadata", "--format-version", "1"))["packages"]
    for crate in sorted(known, key=lambda crate: (crate["name"], crate["version"])):
        # Those of the project itself have no source, and its license.
        if crate["source"] is not None and (crate["name"], f"v{crate['version']}") in named:
            yield crate


def cargo(*arguments: str) -> str:
    """What cargo prints."""
    command = ["cargo", arguments[0], "--locked", *arguments[1:]]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def texts(crate: dict[str, Any]) -> Iterator[str]:
    """The texts that a crate comes with, also those of code that others wrote, or the one that is supplied."""
    root = Path(crate["manifest_path"]).parent
    if crate["name"] in SUPPLIED and crate["license"] == "MIT":
        yield SUPPLIED[crate["name"]].format(holders=", ".join(crate["authors"]))
        return
    for path in sorted(root.rglob("*")):
        if path.is_file() and NAMES.match(path.name) and path.suffix not in CODE:
            yield path.read_text(errors="replace").strip("\n")


def paragraph(license_name: str, found: tuple[str, ...], crates: list[dict[str, Any]]) -> Iterator[str]:
    """A paragraph on crates that have the same license with the same texts."""
    yield "Files: " + " ".join(f"{crate['name']}-{crate['version']}/*" for crate in crates)
    holders = list(dict.fromkeys(line.strip() for text in found for line in HOLDER.findall(text)))
    holders = holders or sorted({author for crate in crates for author in crate["authors"]})
    yield "Copyright: " + ("\n ".join(holders) or "no holder is named")
    yield f"License: {license_name.replace('/', ' OR ')}"
    yield from shown(found)


def shown(found: tuple[str, ...]) -> Iterator[str]:
    """Texts of licenses as Debian writes them; of the Apache License, which packages have, where it is."""
    if any(APACHE.search(text) for text in found):
        yield " The text of the Apache License 2.0 is in /usr/share/common-licenses/Apache-2.0 of Debian, and in"
        yield " LICENSE of hoistway's archives and wheels."
    left = dict.fromkeys(APACHE.sub("", text).strip() for text in found)
    for line in "\n\n".join(text for text in left if text).splitlines():
        yield f" {line.rstrip()}" if line.strip() else " ."


def standard_library() -> Iterator[str]:
    """A paragraph on Rust's standard library, of what the toolchain says of it and of the crates in it."""
    found = subprocess.check_output(["rustc", "--print", "sysroot"], cwd=ROOT, text=True).strip()
    notices = Path(found, "share/doc/rust/COPYRIGHT-library.html")
    if not notices.is_file():
        sys.exit(f"{notices} is missing: it has the notices of Rust's standard library")
    page = re.sub(r"<(style|script|title)\b.*?</\1>", "", notices.read_text(), flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    yield "Files: rust-std/*"
    yield "Copyright: The Rust Project Developers (see https://thanks.rust-lang.org), and those that are named below"
    yield "License: MIT OR Apache-2.0"
    yield from shown((re.sub(r"\n\s*\n+", "\n\n", text),))


def linked_by_zig() -> Iterator[str]:
    """Paragraphs on what Zig links into programs and libraries: parts of its own, and LLVM's libunwind."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        sys.exit("the package ziglang is missing: it has the notices of what Zig links")
    root = Path(found.origin).parent
    yield "Files: zig/compiler_rt/*"
    yield "Copyright: Zig contributors"
    yield "License: MIT"
    yield from shown(((root / "LICENSE").read_text().strip("\n"),))
    yield ""
    yield "Files: llvm/libunwind/*"
    yield "Copyright: the LLVM project's contributors"
    yield "License: Apache-2.0 WITH LLVM-exception"
    yield from shown(((root / "lib/libunwind/LICENSE.TXT").read_text().strip("\n"),))


if __name__ == "__main__":
    main(*sys.argv[1:])
