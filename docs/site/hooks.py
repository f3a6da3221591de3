"""Tables for screens of every width: numbers do not wrap, and on a phone the rows of wide tables are lists."""

from __future__ import annotations

import re
from typing import Any

WIDE_COLUMNS = 5
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
NUMBER = re.compile(r"[\d(][\d.,×%()–\s/-]*(?: [A-Za-zµ]{1,4}(?:/s)?)?")


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with the content of each page."""
    return TABLE.sub(lambda table: marked(table[0]), html)


def marked(table: str) -> str:
    """A table whose cells know their columns, and whether they are numbers."""
    headings = [re.sub(r"<[^>]+>", "", heading) for heading in HEADING.findall(table)]

    def row(found: re.Match[str]) -> str:
        names = iter(headings)
        return CELL.sub(lambda one: cell(one, next(names, "")), found[0])

    rows = ROW.sub(row, table)
    return rows.replace("<table>", "<table data-wide>", 1) if len(headings) >= WIDE_COLUMNS else rows


def cell(found: re.Match[str], heading: str) -> str:
    """A cell with the name of its column."""
    number = " data-number" if NUMBER.fullmatch(found[2]) else ""
    return f'<td{found[1]}{number} data-column="{heading}">{found[2]}</td>'
