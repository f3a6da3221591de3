"""Timelines of loads, saves and KV stores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hoistway import _native


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes a timeline of what hoistway does in the block to a file, for https://ui.perfetto.dev.

    It has a row for each thread, and rows for the reads that each thread has in flight and for the copies to a device.
    All threads of this process are recorded, those of KV stores too. A process records one timeline at a time.

    Examples:
        >>> import hoistway
        >>> with hoistway.trace("timeline.json"):  # doctest: +SKIP
        ...     tensors = hoistway.load_file("model.safetensors")

    Raises:
        HoistwayError: The file cannot be written, is there and no timeline, or a timeline is recorded already. It is
            an ``OSError`` too.
    """
    recording = _native.Recording(os.fspath(path))
    try:
        yield
    except BaseException as error:
        # What the block raised is what its caller is to see.
        try:
            recording.finish()
        except OSError as unwritten:
            # Python 3.10 has no notes.
            if hasattr(error, "add_note"):
                error.add_note(f"the timeline is not whole: {unwritten}")
        raise
    recording.finish()
