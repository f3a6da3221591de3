"""Reading ahead: small tensors that programs ask for one by one are read together with their neighbours in the file."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from hoistway.errors import HoistwayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoistway._checkpoint import Checkpoint
    from hoistway._native import Report, Tensor

WINDOW_BYTES = 16 << 20
"""Bytes of neighbours that one load reads. A longer tensor is read alone."""

WINDOW_TENSORS = 1024
"""Neighbours that one load reads: each takes time, however short it is."""

MOST_WAITING_BYTES = 64 << 20
"""Bytes that windows with tensors that wait to be asked for may have in memory, of all open files together."""

BLOCK_BYTES = 2 << 20
"""A tensor keeps all of each block of this size that it lies in."""

_TENSOR_BYTES = 256
"""What a tensor takes besides its bytes: to align these, and to describe it."""

_logger = logging.getLogger("hoistway.files")


class ReadAhead:
    """Reads the tensors of one open file in windows: neighbours in the file, up to `WINDOW_BYTES` and `WINDOW_TENSORS`.

    The first tensor that is asked for is read alone, as nothing says that others will be. Each tensor of a window is
    given out once, and only if the file is still unchanged then.

    Args:
        checkpoint: The open file.
        count: Called with the report of each load.
    """

    def __init__(self, checkpoint: Checkpoint[Any], count: Callable[[Report], None]) -> None:
        self._checkpoint = checkpoint
        self._count = count
        self._state = _State()
        _files.add(self)

    def take(self, name: str) -> Tensor | None:
        """The tensor of this name, if it was read ahead or its window may be read now. It is the caller's.

        Raises:
            FileChangedError: The file was changed since it was opened.
            TruncatedError: The file was truncated since it was opened.
        """
        # Of a signal handler or a `__del__` that interrupted this thread here: it has locks already.
        if getattr(_this_thread, "is_taking", False):
            return None
        try:
            _this_thread.is_taking = True
            tensor = self._taken(name)
        finally:
            _this_thread.is_taking = False
        if tensor is not None:
            self._checkpoint._opened.check_unchanged(name)
        return tensor

    def skip(self, name: str) -> None:
        """A part of this tensor is read by itself: the whole is not read along with neighbours, and does not wait."""
        windows = self._state.windows
        window = None if windows is None else windows.get(name)
        if window is None:
            return
        window.names.pop(name, None)
        # Without its lock, which a load may have for long. What waits was read, and is not read ahead again.
        if window.waiting.pop(name, None) is not None and not window.waiting:
            _in_memory.pop(window, None)

    def close(self) -> None:
        """Drops what waits."""
        for window in set((self._state.windows or {}).values()):
            _in_memory.pop(window, None)
        self._state = _State()

    def _taken(self, name: str) -> Tensor | None:
        # Once: a child of fork gets another.
        state = self._state
        if state.windows is None:
            with state.lock:
                if state.first is None:
                    state.first = name
                    return None
                if state.windows is None:
                    state.of_parent = None
                    state.windows = self._divided(state.first)
        window = state.windows.get(name)
        # What was taken already is read alone, and so waits for no window that another thread reads.
        if window is None or name not in window.names:
            return None
        with window.lock:
            try:
                if not window.is_read:
                    self._read(window)
                return window.waiting.pop(name, None)
            finally:
                window.names.pop(name, None)
                if not window.waiting:
                    _in_memory.pop(window, None)

    def _read(self, window: _Window) -> None:
        """Reads a window, if there is room for it. If that fails, the load of each tensor alone says what is wrong."""
        names = list(window.names)
        if len(names) < 2:
            return
        # Before it is compared with the limit: threads that read other windows do the same.
        _in_memory[window] = window.memory_bytes
        if waiting_bytes() > MOST_WAITING_BYTES:
            return
        window.is_read = True
        try:
            tensors, report = self._checkpoint._load_native({"select": names})
        except HoistwayError as error:
            _logger.debug("%d tensors are read one by one, as together they fail: %s", len(names), error)
            return
        if not self._checkpoint._is_mapped(self._checkpoint._options):
            # More than the tensors have in the file, where many are misaligned there, and copied to another place.
            arena_bytes: int = json.loads(report.json())["memory"]["arena_bytes"]
            _in_memory[window] = max(window.memory_bytes, arena_bytes // BLOCK_BYTES * BLOCK_BYTES)
        self._count(report)
        # Not those that were asked for in part meanwhile.
        window.waiting = {tensor.name: tensor for tensor in tensors if tensor.name in window.names}

    def _divided(self, first: str) -> dict[str, _Window]:
        """The windows of the file, by the names of their tensors."""
        windows: dict[str, _Window] = {}
        window = _Window()
        for name, _dtype, _shape, _bytes_shape, nbytes in self._checkpoint._opened.planned():
            if nbytes > WINDOW_BYTES:
                continue
            # Also of the first: a load may read over a gap.
            in_memory = nbytes + _TENSOR_BYTES
            is_full = window.tensor_bytes + in_memory > WINDOW_BYTES or len(window.names) >= WINDOW_TENSORS
            if is_full:
                window = _Window()
            window.tensor_bytes += in_memory
            if name != first:
                window.names[name] = None
                windows[name] = window
        return windows


class _State:
    """What was asked for of a file, and how it is divided.

    Args:
        of_parent: In a child of fork, what the parent had.
    """

    def __init__(self, of_parent: _State | None = None) -> None:
        self.of_parent = of_parent
        self.lock = threading.Lock()
        self.first: str | None = None
        self.windows: dict[str, _Window] | None = None


class _Window:
    """Neighbours that are read together, once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tensor_bytes = 0
        self.is_read = False
        # In the order of the file, those that were not asked for.
        self.names: dict[str, None] = {}
        self.waiting: dict[str, Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        """What it takes until none of its tensors waits: one of them may keep a whole block."""
        return -(-self.tensor_bytes // BLOCK_BYTES) * BLOCK_BYTES


def waiting_bytes() -> int:
    """Bytes that windows with tensors that wait take, of all open files together."""
    return sum(list(_in_memory.values()))


_in_memory: dict[_Window, int] = {}
"""The windows that are being read, or of which tensors wait, with the bytes that they take."""

_files: WeakSet[ReadAhead] = WeakSet()
_this_thread = threading.local()


def _begin_in_child() -> None:
    # Threads that had locks are the parent's, and so are the loads that they wait for.
    # Tensors are not freed here, while the process forks.
    for file in list(_files):
        file._state = _State(file._state)
    _in_memory.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
