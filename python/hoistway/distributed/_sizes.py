"""Sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from hoistway.errors import OptionError

_UNITS = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("kmgtpe", start=1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("kmgtpe", start=1)},
}


def size_in_bytes(option: str, size: int | str) -> int:
    """A number of bytes, from a number or from text such as ``"64MiB"``, by the rule of every load.

    >>> size_in_bytes("max_in_flight", "1.5 GiB")
    1610612736
    """
    # Fractions need a unit: without one, the engine takes whole numbers only.
    found = re.fullmatch(r"(\d+)|(\d+\.?\d*|\.\d+)\s*([kmgtpe]i?b?|b)", str(size).lower(), re.ASCII)
    if found is None or isinstance(size, bool) or not isinstance(size, int | str):
        raise OptionError(f"{option} cannot be {size!r}: it must be a size such as 4194304, '4MiB' or '8GB'")
    nbytes = int(found[1]) if found[1] else int(Decimal(found[2]) * _UNITS[found[3].removesuffix("b")])
    if nbytes >= 1 << 64:
        raise OptionError(f"{option} cannot be {size!r}: that is more than a number of 64 bits holds")
    return nbytes
