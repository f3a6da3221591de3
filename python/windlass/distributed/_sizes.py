"""Sizes as people write them, and as they read them."""

from __future__ import annotations

import re

from windlass.errors import OptionError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def size_in_bytes(option: str, size: int | str) -> int:
    """A number of bytes, from a number or from text such as ``"64MiB"``."""
    text = str(size).strip().lower()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text)
    unit = {**_UNITS, **_BINARY}.get(found[2]) if found else None
    if found is None or unit is None or isinstance(size, bool):
        raise OptionError(f"{option} cannot be {size!r}: it is a size such as 4194304, '4MiB' or '8GB'")
    return int(float(found[1]) * unit)


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
