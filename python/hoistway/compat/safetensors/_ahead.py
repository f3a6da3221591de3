"""Reading ahead: small tensors that programs ask for one by one are read together with their neighbours in the file."""

from __future__ import annotations

import os
from threading import Lock
from typing import TYPE_CHECKING, Any

from hoistway.errors import HoistwayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoistway._checkpoint import Checkpoint
    from hoistway._native import Report, Tensor

WINDOW_BYTES = 16 << 20
"""Bytes of neighbours that one load reads. A longer tensor is read alone."""

MOST_WAITING_BYTES = 64 << 20
"""Bytes that may wait to be asked for, of all open files together."""


class ReadAhead:
    """Reads the tensors of one open file in windows: neighbours in the file, up to `WINDOW_BYTES`.

    The first tensor that is asked for is read alone, as nothing says that others will be. Each tensor of a window is
    given out once, and only if the file is still unchanged then.

    Args:
        checkpoint: The open file.
        count: Called with the report of each load.
    """

    def __init__(self, checkpoint: Checkpoint[Any], count: Callable[[Report], None]) -> None:
        self._checkpoint = checkpoint
        self._count = count
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._first: str | None = None
        # Of each tensor that was not read the window, which its tensors share.
        self._windows: dict[str, dict[str, int]] | None = None
        self._waiting: dict[str, Tensor] = {}
        self.waiting_bytes = 0

    def take(self, name: str) -> Tensor | None:
        """The tensor of this name, if it was read ahead or its window may be read now. It is the caller's.

        Raises:
            FileChangedError: The file was changed since it was opened.
            TruncatedError: The file was truncated since it was opened.
        """
        if self._process != os.getpid():
            # A child of fork: a thread that has the lock is the parent's.
            self._begin()
        with self._lock:
            if name not in self._waiting and not self._read_window(name):
                return None
            tensor = self._waiting.pop(name)
            self.waiting_bytes -= tensor.nbytes
        self._checkpoint._opened.check_unchanged(name)
        return tensor

    def close(self) -> None:
        """Drops what waits."""
        _open_files.pop(id(self), None)
        self._waiting = {}

    def _read_window(self, name: str) -> bool:
        """Reads the window of a tensor. `False` if that is not done, or fails: then the tensor is to be read alone."""
        if self._first is None:
            self._first = name
            return False
        if self._windows is None:
            self._windows = self._divided()
        window = self._windows.pop(name, None)
        if window is None:
            return False
        window_bytes = sum(window.values())
        _open_files[id(self)] = self
        # Before it is compared with the limit: threads that read other files do the same.
        self.waiting_bytes += window_bytes
        if sum(file.waiting_bytes for file in list(_open_files.values())) > MOST_WAITING_BYTES:
            self.waiting_bytes -= window_bytes
            del window[name]
            return False
        try:
            tensors, report = self._checkpoint._load_native({"select": list(window)})
        except BaseException as error:
            self.waiting_bytes -= window_bytes
            if not isinstance(error, HoistwayError):
                raise
            # The load of the tensor alone says what is wrong, if anything is with this one.
            self._windows = {}
            return False
        self._count(report)
        for other in window:
            self._windows.pop(other, None)
        self._waiting.update((tensor.name, tensor) for tensor in tensors)
        return True

    def _divided(self) -> dict[str, dict[str, int]]:
        """The windows of the file, by the names of their tensors."""
        windows: dict[str, dict[str, int]] = {}
        window: dict[str, int] = {}
        window_bytes = 0
        for name, _dtype, _shape, _bytes_shape, nbytes in self._checkpoint._opened.planned():
            if name == self._first or nbytes > WINDOW_BYTES:
                continue
            if window_bytes + nbytes > WINDOW_BYTES:
                window, window_bytes = {}, 0
            window[name] = nbytes
            window_bytes += nbytes
            windows[name] = window
        return {name: window for name, window in windows.items() if len(window) > 1}


_open_files: dict[int, ReadAhead] = {}
"""Those that have read ahead, and are not closed."""
