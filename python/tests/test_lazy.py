"""Attributes that are found out when they are first asked for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from hoistway._lazy import lazy


class Slow:
    def __init__(self, wait: threading.Event | threading.Barrier | None = None) -> None:
        self.begun = threading.Event()
        self.computed = 0
        self._wait = wait

    @lazy
    def value(self) -> list[int]:
        """A value."""
        self.computed += 1
        self.begun.set()
        if self._wait is not None:
            assert self._wait.wait(60) is not False
        return []


def test_a_value_is_computed_once() -> None:
    slow = Slow()
    assert slow.value is slow.value
    assert slow.computed == 1
    assert isinstance(Slow.value, lazy)
    assert Slow.value.__doc__ == "A value."


def test_no_object_waits_for_another() -> None:
    go_on = threading.Event()
    slow = Slow(go_on)
    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(lambda: slow.value)
            assert slow.begun.wait(60)
            assert pool.submit(lambda: Slow().value).result(60) == []
        finally:
            go_on.set()
        assert first.result(60) is slow.value


def test_threads_that_ask_at_once_get_the_same_value() -> None:
    slow = Slow(threading.Barrier(4))
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda _: slow.value, range(4)))
    assert slow.computed == 4
    assert all(value is slow.value for value in values)
