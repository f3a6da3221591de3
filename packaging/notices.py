"""Prints the copyright and the licenses of the crates that a package is linked with, as Debian writes them (DEP 5).

Usage: ``notices.py PACKAGE TARGET``. The crates are those that ``cargo tree`` names; their texts come with them.
"""

from __future__ import annotations

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
HOLDER = re.compile(r"^\W*(copyright\s+(?:\(c\)|©|\d|[A-Z]).*\S)", re.IGNORECASE | re.MULTILINE)
# Of these Debian has the texts, in /usr/share/common-licenses.
APACHE = "                                 Apache License"


def main(package: str, target: str) -> None:
    """Prints a paragraph for each text, with the crates that have it."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for crate in linked(package, target):
        groups[crate["license"] or "unknown", "\n\n".join(texts(crate))].append(crate)
    for (license_name, text), crates in sorted(groups.items(), key=lambda group: group[1][0]["name"]):
        print("\n".join(paragraph(license_name, text, crates)), end="\n\n")


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
    """The texts that a crate comes with, but for that of the Apache License."""
    for path in sorted(Path(crate["manifest_path"]).parent.iterdir()):
        if path.is_file() and NAMES.match(path.name):
            text = path.read_text(errors="replace").strip("\n")
            if APACHE.strip() not in text[:400] or "notice" in path.name.lower():
                yield text


def paragraph(license_name: str, text: str, crates: list[dict[str, Any]]) -> Iterator[str]:
    """A paragraph on crates that have the same license with the same text."""
    yield "Files: " + " ".join(f"{crate['name']}-{crate['version']}/*" for crate in crates)
    holders = HOLDER.findall(text) or sorted({author for crate in crates for author in crate["authors"]})
    yield "Copyright: " + ("\n ".join(holders) or "the authors of the crate")
    yield f"License: {license_name.replace('/', ' OR ')}"
    if "Apache-2.0" in license_name:
        yield " The text of the Apache License 2.0 is in /usr/share/common-licenses/Apache-2.0."
    for line in text.splitlines():
        yield f" {line.rstrip()}" if line.strip() else " ."


if __name__ == "__main__":
    main(*sys.argv[1:])
