"""Numbers in words."""

from __future__ import annotations

import html
from collections.abc import Iterable
from itertools import islice


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "tensor"), counted(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_words(count: float) -> str:
    """Bytes for people.

    >>> in_words(1536 << 20)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


_MOST_ROWS = 20
"""Tensors that a notebook lists."""


def listed(tensors: Iterable[tuple[str, str, str]], count: int) -> str:
    """A table of the first tensors for a notebook, of their names, types and shapes; and how many more there are.

    >>> listed([("a<b", "F32", "[2]")], 1)
    '<table><tr><th>tensor</th><th>dtype</th><th>shape</th></tr><tr><td>a&lt;b</td><td>F32</td><td>[2]</td></tr></table>'
    """
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in tensor) + "</tr>"
        for tensor in islice(tensors, _MOST_ROWS)
    )
    more = f"<p>and {counted(count - _MOST_ROWS, 'more tensor')}</p>" if count > _MOST_ROWS else ""
    return f"<table><tr><th>tensor</th><th>dtype</th><th>shape</th></tr>{rows}</table>{more}"


def preformatted(text: str) -> str:
    """Text as a notebook shows it.

    >>> preformatted("a < b")
    '<pre>a &lt; b</pre>'
    """
    return f"<pre>{html.escape(text)}</pre>"


def rate_in_words(bytes_per_second: float) -> str:
    """A rate for people, in powers of ten as drives and networks state it.

    >>> rate_in_words(4_390_000_000)
    '4.39 GB/s'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if bytes_per_second < 1000:
            return f"{bytes_per_second:.2f} {unit}/s"
        bytes_per_second /= 1000
    return f"{bytes_per_second:.2f} TB/s"
