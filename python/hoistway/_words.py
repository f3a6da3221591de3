"""Numbers in words."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "tensor"), counted(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
