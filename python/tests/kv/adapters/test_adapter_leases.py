"""Requests that ran out of time while the kernel has their memory: engines must not have it back before. No host is
needed for these.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from adapter_hosts import INTERRUPTS, SMALL, Held, failing_on_second_call, released_later
from hoistway.errors import MemoryLostError, StorageError
from hoistway.kv import _ending
from hoistway.kv.adapters import _tickets
from hoistway.kv.adapters.lmcache import Client


# After an error of a ring or a device that leaves in doubt what it still does, too.
@pytest.mark.parametrize("status", ["timed_out", "cancelled", "io:5"])
def test_memory_of_a_request_is_free_when_it_is_released(status):
    ticket = Held("ok", status)
    assert _tickets.outcome(ticket) is None
    ticket.is_released = True
    assert _tickets.outcome(ticket) is ticket.completion


def test_a_request_that_has_not_ended_has_no_outcome():
    ticket = Held("ok", released=True)
    assert _tickets.outcome(ticket) is ticket.completion
    ticket.is_done = False
    assert _tickets.outcome(ticket) is None


def test_settling_fails_where_the_memory_is_lost():
    ticket = Held("ok", "io:5")
    ticket.is_lost = True
    with pytest.raises(MemoryLostError, match="1 io:5, 1 ok"):
        _tickets.complete(lambda: ticket)
    assert _tickets.outcome(ticket) is None


def test_settling_waits_for_the_release(monkeypatch):
    ticket, pauses = Held("timed_out"), []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        ticket.is_released = len(pauses) == 20

    monkeypatch.setattr(_ending.time, "sleep", sleep)
    assert _tickets.complete(lambda: ticket) is ticket.completion
    assert len(pauses) == 20
    assert pauses == sorted(pauses)


def test_all_requests_are_settled_though_memory_of_one_is_lost():
    lost, held = Held("io:5"), Held("timed_out")
    lost.is_lost = True
    releasing = threading.Timer(0.1, setattr, (held, "is_released", True))
    releasing.start()
    with pytest.raises(MemoryLostError, match="1 io:5"):
        _ending.settle_all([lost, held])
    assert held.is_released, "it is waited for"
    releasing.join()
    assert _ending.settle_all([held, held]) == [held.completion] * 2


@pytest.mark.parametrize("interrupt", INTERRUPTS)
@pytest.mark.parametrize("end", [_ending.settle_all, _ending.abandon])
def test_an_interrupted_wait_cancels_and_goes_on_until_the_release(end, interrupt):
    ticket = Held("cancelled")
    # Ctrl-C is pressed twice.
    ticket.interrupts = [interrupt("first"), interrupt("second")]
    timer = released_later(ticket)
    with pytest.raises(interrupt):
        end([ticket])
    assert ticket.is_cancelled
    assert ticket.is_released
    timer.join()


def test_a_request_is_known_though_a_signal_comes_as_it_begins():
    ticket = Held("ok", released=True)

    def start() -> Held:
        # Freeing it, which is the last of the call, takes longer than the timer.
        ballast = [[] for _ in range(2_000_000)]
        signal.setitimer(signal.ITIMER_REAL, 0.005 if ballast else 0)
        return ticket

    def interrupt(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is start.__code__:
            # This machine was away before the call could return: again.
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            return
        raise KeyboardInterrupt

    def begin() -> None:
        # As SGLang's adapter hands requests over.
        _ending.start_into(begun, partial(start))
        time.sleep(5)

    before = signal.signal(signal.SIGALRM, interrupt)
    begun: list[Held] = []
    try:
        with pytest.raises(KeyboardInterrupt):
            begin()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert begun == [ticket]


def test_abandoned_memory_that_is_lost_is_an_error():
    lost, held = Held("io:5"), Held("cancelled")
    lost.is_lost = True
    timer = released_later(held)
    with pytest.raises(MemoryLostError, match="1 io:5"):
        _ending.abandon([lost, held])
    assert held.is_released
    timer.join()


@pytest.mark.parametrize("what", ["load", "store"])
@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_lmcache_gets_its_memory_back_when_an_operation_cannot_begin(
    tmp_path: Path, monkeypatch, interrupt, what
):
    client = Client(str(tmp_path / "kv"), **SMALL)
    first = Held("cancelled")
    monkeypatch.setattr(client._blocks.__class__, what, failing_on_second_call(first, interrupt))
    submit = client.submit_batch_get if what == "load" else client.submit_batch_set
    timer = released_later(first)
    with pytest.raises(interrupt, match="of the second"):
        # Of two lengths: an operation of two requests.
        submit(["a", "b"], [memoryview(bytearray(100)), memoryview(bytearray(200))])
    assert first.is_cancelled
    assert first.is_released, "LMCache may use the memory now"
    # The end of the first request belongs to no operation that LMCache knows.
    drained = [[first.completion]]
    monkeypatch.setattr(client._store, "drain_completions", lambda: drained.pop() if drained else [])
    assert client.drain_completions() == []
    timer.join()
    client.close()


def test_lmcache_is_told_when_its_memory_is_free(tmp_path: Path, monkeypatch):
    client = Client(str(tmp_path / "kv"), **SMALL)
    ticket = Held("ok", "timed_out")
    monkeypatch.setattr(client._blocks.__class__, "load", lambda *_, **__: ticket)
    store = client._store
    drained = [[ticket.completion]]
    monkeypatch.setattr(store, "drain_completions", lambda: drained.pop() if drained else [])
    number = client.submit_batch_get(["a", "b"], [memoryview(bytearray(100))] * 2)
    assert client.drain_completions() == []
    ticket.is_released = True
    # The descriptor tells, though nothing else ends.
    poll = select.poll()
    poll.register(client.event_fd(), select.POLLIN)
    assert poll.poll(20_000)
    assert client.drain_completions() == [(number, False, "1 ok, 1 timed_out", [True, False])]
    client.close()


def test_leased_memory_of_lmcache_takes_one_timer(tmp_path: Path, monkeypatch):
    client = Client(str(tmp_path / "kv"), **SMALL)
    ticket = Held("timed_out")
    monkeypatch.setattr(client._blocks.__class__, "load", lambda *_, **__: ticket)
    drained = [[ticket.completion]]
    monkeypatch.setattr(client._store, "drain_completions", lambda: drained.pop() if drained else [])
    client.submit_batch_get(["a"], [memoryview(bytearray(100))])
    timers = []

    class Timer:
        def __init__(self, _seconds: float, wake: Any) -> None:
            timers.append(wake)

        def start(self) -> None:
            pass

    monkeypatch.setattr(threading, "Timer", Timer)
    for _ in range(5):
        client.drain_completions()
    assert len(timers) == 1
    timers[0]()
    client.drain_completions()
    assert len(timers) == 2, "it is looked at again"
    ticket.is_released = True
    client.close()


def test_lmcache_is_never_told_of_memory_that_is_lost(tmp_path: Path, monkeypatch, caplog):
    client = Client(str(tmp_path / "kv"), **SMALL)
    ticket = Held("io:5")
    monkeypatch.setattr(client._blocks.__class__, "load", lambda *_, **__: ticket)
    drained = [[ticket.completion]]
    monkeypatch.setattr(client._store, "drain_completions", lambda: drained.pop() if drained else [])
    client.submit_batch_get(["a"], [memoryview(bytearray(100))])
    ticket.is_lost = True
    assert client.drain_completions() == []
    assert "may use its memory for ever" in caplog.text
    assert client.drain_completions() == []
    client.close()


def test_closing_lmcaches_client_waits_for_memory(tmp_path: Path, monkeypatch):
    client = Client(str(tmp_path / "kv"), **SMALL)
    ticket = Held("cancelled")
    monkeypatch.setattr(client._blocks.__class__, "load", lambda *_, **__: ticket)
    client.submit_batch_get(["a"], [memoryview(bytearray(100))])
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    ticket.is_released = True
    closing.join(20)
    assert not closing.is_alive()


def test_closing_lmcaches_client_waits_for_memory_beside_what_is_lost(tmp_path: Path, monkeypatch):
    client = Client(str(tmp_path / "kv"), **SMALL)
    lost, held = Held("io:5"), Held("timed_out")
    lost.is_lost, held.id = True, lost.id + 1
    tickets = iter([lost, held])
    monkeypatch.setattr(client._blocks.__class__, "load", lambda *_, **__: next(tickets))
    drained = [[lost.completion, held.completion]]
    held.completion.ticket = held.id
    monkeypatch.setattr(client._store, "drain_completions", lambda: drained.pop() if drained else [])
    # Of two lengths: an operation of two requests.
    client.submit_batch_get(["a", "b"], [memoryview(bytearray(100)), memoryview(bytearray(200))])
    assert client.drain_completions() == []
    closing = threading.Thread(target=client.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    held.is_released = True
    closing.join(20)
    assert not closing.is_alive()


def test_lmcaches_client_does_not_fail_when_its_store_cannot_be_closed(tmp_path: Path, monkeypatch, caplog):
    client = Client(str(tmp_path / "kv"), **SMALL)
    close = client._store.close

    def fail() -> None:
        raise StorageError("no room for the index")

    monkeypatch.setattr(client._store, "close", fail)
    client.close()
    assert "no room for the index" in caplog.text
    close()
