"""Requests that ran out of time while the kernel has their memory: engines must not have it back before. No host is
needed for these.
"""

from __future__ import annotations

import select
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adapter_hosts import SMALL
from windlass.errors import StorageError
from windlass.kv.adapters import _tickets
from windlass.kv.adapters.lmcache import Client


class Held:
    """A ticket whose memory a test holds on to."""

    def __init__(self, *statuses: str, released: bool = False) -> None:
        succeeded = [status in ("ok", "exists") for status in statuses]
        self.id = 1 << 60
        self.completion = SimpleNamespace(
            ticket=self.id,
            statuses=list(statuses),
            succeeded=succeeded,
            ok=all(succeeded),
            bytes=0,
            moving=0.0,
        )
        self.is_done, self.is_released, self.is_lost = True, released, False

    def done(self) -> bool:
        return self.is_done

    def released(self) -> bool:
        return self.is_released

    def lost(self) -> bool:
        return self.is_lost

    def cancel(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> Any:
        assert self.is_done
        return self.completion


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
    with pytest.raises(_tickets.MemoryLostError, match="1 io:5, 1 ok"):
        _tickets.settle(ticket)
    assert _tickets.outcome(ticket) is None


def test_settling_waits_for_the_release(monkeypatch):
    ticket, pauses = Held("timed_out"), []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        ticket.is_released = len(pauses) == 20

    monkeypatch.setattr(_tickets.time, "sleep", sleep)
    assert _tickets.settle(ticket) is ticket.completion
    assert len(pauses) == 20
    assert pauses == sorted(pauses)


def test_all_requests_are_settled_though_memory_of_one_is_lost():
    lost, held = Held("io:5"), Held("timed_out")
    lost.is_lost = True
    releasing = threading.Timer(0.1, setattr, (held, "is_released", True))
    releasing.start()
    with pytest.raises(_tickets.MemoryLostError, match="1 io:5"):
        _tickets.settle_all([lost, held])
    assert held.is_released, "it is waited for"
    releasing.join()
    assert _tickets.settle_all([held, held]) == [held.completion] * 2


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
