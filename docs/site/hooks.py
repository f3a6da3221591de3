"""Tables for screens of every width: numbers do not wrap, and on a phone the rows of wide tables are lists."""

from __future__ import annotations

import re
from typing import Any

WIDE_COLUMNS = 5
# Characters of a word that a phone's column has no room for.
LONG_WORD = 16
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
# Where a name or a path may break: not inside a tag.
JOINT = re.compile(r"(?<=\w)[_/](?=\w)(?![^<]*>)")
NUMBER = re.compile(r"[\d(][\d.,×%()–\s/-]*(?: [A-Za-zµ]{1,4}(?:/s)?)?")


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with the content of each page."""
    return TABLE.sub(lambda table: marked(table[0]), html)


def marked(table: str) -> str:
    """A table whose cells know their columns, and whether they are numbers."""
    headings = [TAG.sub("", heading) for heading in HEADING.findall(table)]

    def row(found: re.Match[str]) -> str:
        names = iter(headings)
        return CELL.sub(lambda one: cell(one, next(names, "")), found[0])

    rows = ROW.sub(row, table)
    return rows.replace("<table>", "<table data-wide>", 1) if len(headings) >= WIDE_COLUMNS else rows


def cell(found: re.Match[str], heading: str) -> str:
    """A cell with the name of its column."""
    content, kind = found[2], ""
    if NUMBER.fullmatch(content):
        kind = " data-number"
    elif any(len(word) > LONG_WORD for word in TAG.sub("", content).split()):
        kind = " data-long"
        content = JOINT.sub(r"\g<0><wbr>", content)
    return f'<td{found[1]}{kind} data-column="{heading}">{content}</td>'
