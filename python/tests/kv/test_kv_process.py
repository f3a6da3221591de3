"""A store and the process around it: threads, event loops, forks, imports."""

from __future__ import annotations

import asyncio
import gc
import select
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import OpenStore, random_bytes, run
from hoistway import kv
from hoistway.kv._waiting import PATIENCE
from interrupting import wait_until


def test_threads_share_a_store(blocks: kv.Namespace) -> None:
    def work(thread: int) -> None:
        for number in range(30):
            key = f"{thread} {number}"
            data = random_bytes(20_000)
            assert blocks.store([key], [data]).wait(30).ok
            found = bytearray(20_000)
            assert blocks.load([key], [found]).wait(30).ok
            assert found == data

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_one_ticket_is_waited_for_by_many(blocks: kv.Namespace) -> None:
    ticket = blocks.store(["a"], [random_bytes(1 << 20)])
    with ThreadPoolExecutor(8) as threads:
        completions = list(threads.map(lambda _: ticket.wait(30), range(8)))
    assert all(completion.ok for completion in completions)


def test_completions_are_told_by_the_descriptor(store: kv.Store, blocks: kv.Namespace) -> None:
    descriptor = store.event_fd()
    assert select.select([descriptor], [], [], 0)[0] == []
    tickets = [blocks.store([str(number)], [random_bytes(5000)], notify=True) for number in range(20)]
    quiet = blocks.store(["quiet"], [random_bytes(5000)])
    drained: list[kv.Completion] = []
    while len(drained) < 20:
        assert select.select([descriptor], [], [], 30)[0] == [descriptor]
        drained += store.drain_completions()
    assert {completion.ticket for completion in drained} == {ticket.id for ticket in tickets}
    assert all(completion.ok for completion in drained)
    quiet.wait(30)
    assert store.drain_completions() == []
    assert select.select([descriptor], [], [], 0)[0] == []


class Interrupt(BaseException):
    """What the handler of a signal raises."""


def interrupt_call(*_: object) -> None:
    """Handles a signal."""
    raise Interrupt


@pytest.mark.parametrize("notify", [False, True])
@pytest.mark.parametrize("what", ["store", "load"])
def test_memory_is_free_when_a_call_is_interrupted_once_the_request_has_begun(
    store: kv.Store, blocks: kv.Namespace, what: str, notify: bool
) -> None:
    """A signal that comes during the call is handled after it, before the caller has a ticket."""
    size, count = 4096, 4000
    arena = random_bytes(size * count)
    view = memoryview(arena)
    buffers = [view[place * size : (place + 1) * size] for place in range(count)]
    keys = [str(number) for number in range(count)]
    if what == "load":
        blocks.store(keys, buffers).wait(30)

    main = threading.get_ident()
    files: list[str] = []

    def is_interrupted() -> bool:
        """Whether the call gave the interpreter away for so long that another thread sent a signal."""
        go, is_over = threading.Lock(), False

        def interrupt() -> None:
            with go:
                if not is_over:
                    signal.pthread_kill(main, signal.SIGALRM)

        go.acquire()
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            go.release()
            ticket = getattr(blocks, what)(keys, buffers, notify=notify)
            is_over = True
        except Interrupt as interrupted:
            files.extend(entry.filename for entry in traceback.extract_tb(interrupted.__traceback__))
            return True
        finally:
            thread.join()
        ticket.wait(30)
        if notify:
            wait_until(lambda: bool(store.drain_completions()))
        return False

    before, interval = signal.signal(signal.SIGALRM, interrupt_call), sys.getswitchinterval()
    # A callback of the collector (JAX has one) would run the handler, and drop what it raises.
    gc.disable()
    # No thread takes the interpreter from another.
    sys.setswitchinterval(1000)
    try:
        wait_until(is_interrupted)
    finally:
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert any(file.endswith("_ticket.py") for file in files), "it had begun"
    # Nothing has the memory any more but this test; objects go back with the next call.
    store.stats()
    for buffer in buffers:
        buffer.release()
    view.release()
    arena.append(0)
    assert store.drain_completions() == [], "of a request that the caller does not know"


def test_tickets_can_be_awaited(store: kv.Store, blocks: kv.Namespace) -> None:
    async def main() -> None:
        data = {str(number): random_bytes(3000) for number in range(100)}
        stores = [blocks.store([key], [own], notify=True) for key, own in data.items()]
        assert all(completion.ok for completion in await asyncio.gather(*stores))
        found = {key: bytearray(3000) for key in data}
        loads = [blocks.load([key], [own], notify=True) for key, own in found.items()]
        for ticket in reversed(loads):
            completion = await ticket
            assert (completion.ok, completion.ticket) == (True, ticket.id)
            assert (await ticket).ticket == ticket.id, "again"
        assert found == data
        # Without a thread or a reader that is left.
        assert (await blocks.load(["0"], [bytearray(3000)])).ok

    asyncio.run(main(), debug=True)
    assert store.drain_completions() == [], "what was awaited is not told twice"


def test_completions_that_are_not_awaited_can_still_be_drained(store: kv.Store, blocks: kv.Namespace) -> None:
    async def main() -> set[int]:
        tickets = [blocks.store([str(number)], [random_bytes(3000)], notify=True) for number in range(10)]
        assert (await tickets[9]).ok
        return {ticket.id for ticket in tickets[:9]}

    expected = asyncio.run(main())
    store.flush(30)
    drained: set[int] = set()
    while len(drained) < 9:
        drained |= {completion.ticket for completion in store.drain_completions()}
    assert drained == expected


def test_a_ticket_that_was_drained_can_be_awaited(store: kv.Store, blocks: kv.Namespace) -> None:
    ticket = blocks.store(["a"], [random_bytes(3000)], notify=True)
    while not store.drain_completions():
        pass

    async def main() -> kv.Completion:
        return await asyncio.wait_for(ticket, 30)

    assert asyncio.run(main()).ok


def test_event_loops_of_several_threads(blocks: kv.Namespace) -> None:
    async def work(thread: int) -> None:
        for number in range(50):
            key = f"{thread} {number}"
            assert (await blocks.store([key], [random_bytes(2000)], notify=True)).ok
            assert (await blocks.load([key], [bytearray(2000)], notify=True)).ok

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda thread: asyncio.run(work(thread)), range(4)))


def test_a_task_that_is_cancelled_does_not_wait_any_more(store: kv.Store, blocks: kv.Namespace) -> None:
    async def main() -> None:
        # It lacks a shard, but its own part is written: it ends. The second never gets to run.
        ticket = blocks.store(["a"], [random_bytes(3000)], notify=True)
        task = asyncio.ensure_future(ticket)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await ticket).ok

    asyncio.run(main())
    assert store.drain_completions() == []


def test_a_completion_that_came_as_its_wait_was_given_up_is_not_kept(
    store: kv.Store, blocks: kv.Namespace
) -> None:
    async def main() -> None:
        ticket = blocks.store(["a"], [random_bytes(3000)], notify=True)
        task = asyncio.ensure_future(ticket)
        await asyncio.sleep(0)
        # The loop does not get to learn of it before the task is cancelled.
        ticket.wait(30)
        assert select.select([store.event_fd()], [], [], 30)[0]
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert store.drain_completions() == []


def test_nothing_is_kept_of_a_wait_for_what_was_drained(store: kv.Store, blocks: kv.Namespace) -> None:
    ticket = blocks.store(["a"], [random_bytes(3000)], notify=True)
    while not store.drain_completions():
        pass

    async def main() -> None:
        task = asyncio.ensure_future(ticket)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    time.sleep(2 * PATIENCE)
    assert store.drain_completions() == []
    assert not store._waiting._given_up


def test_a_child_of_fork_is_refused_the_store(store_root: Path) -> None:
    done = run(
        """
        import asyncio, os, signal, sys, threading, hoistway.kv as kv
        store = kv.Store(sys.argv[1], capacity="256MiB", min_free=0)
        blocks = store.namespace(model="test")
        ticket = blocks.store(["a"], [b"x" * 5000])
        unasked = blocks.store(["b"], [b"x" * 5000])
        ticket.wait(30)
        pins = blocks.pin(["a"])
        begun, end = threading.Event(), threading.Event()

        def drain():
            with store._waiting._lock:
                begun.set()
                end.wait()

        thread = threading.Thread(target=drain)
        thread.start()
        assert begun.wait(30)
        store._waiting._given_up.add(0)

        async def ask_for_the_end():
            await unasked

        child = os.fork()
        if child == 0:
            signal.alarm(60)
            asks = [
                lambda: blocks.lookup(["a"]), lambda: blocks.load(["a"], [bytearray(5000)]), store.stats,
                lambda: blocks.load(["a"], [bytearray(5000)], notify=True), store.drain_completions,
                lambda: asyncio.run(ask_for_the_end()),
                store.event_fd, store.close, ticket.wait, ticket.done, pins.release,
            ]
            for ask in asks:
                try:
                    ask()
                except kv.ForkedError as error:
                    assert "open it again" in str(error)
                else:
                    raise SystemExit("no error")
            del blocks, ticket, unasked, pins, asks, ask
            with kv.Store(sys.argv[1], access="read") as own:
                found = bytearray(5000)
                assert own.namespace(model="test").load(["a"], [found]).wait(30).ok
                assert found == b"x" * 5000
            del store
            sys.exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        end.set()
        thread.join()
        assert blocks.lookup(["a"]) == [True], "the parent goes on"
        store.close()
        sys.exit(code)
        """,
        store_root,
    )
    assert done.returncode == 7, done.stderr


def test_an_interpreter_ends_with_requests_under_way(store_root: Path) -> None:
    done = run(
        """
        import sys, hoistway.kv as kv
        store = kv.Store(sys.argv[1], capacity="256MiB", min_free=0)
        blocks = store.namespace(model="test")
        tickets = [blocks.store([str(number)], [bytearray(100_000)]) for number in range(200)]
        print("done")
        """,
        store_root,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_neither_torch_nor_numpy_is_needed(store_root: Path) -> None:
    done = run(
        """
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None
        import array, asyncio, hoistway.kv as kv
        with kv.Store(sys.argv[1], capacity="256MiB", min_free=0) as store:
            blocks = store.namespace(model="test")
            numbers = array.array("d", range(1000))
            found = array.array("d", bytes(8000))
            assert blocks.store(["a"], [numbers]).wait(30).ok
            assert blocks.load(["a"], kv.Addresses([found.buffer_info()[0]], 8000, owner=found)).wait(30).ok
            assert found == numbers
            async def main():
                return await blocks.load(["a"], [found], notify=True)
            assert asyncio.run(main()).ok
        """,
        store_root,
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_store_imports_no_framework() -> None:
    done = run("import sys, hoistway.kv; assert not {'torch', 'numpy'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_processes_share_a_store(store: kv.Store, store_root: Path) -> None:
    blocks = store.namespace(model="test")
    assert blocks.store(["ours"], [b"a" * 5000]).wait(30).ok
    done = run(
        """
        import sys, hoistway.kv as kv
        with kv.Store(sys.argv[1], capacity="256MiB", min_free=0, segment_bytes="16MiB") as store:
            blocks = store.namespace(model="test")
            store.maintain()
            found = bytearray(5000)
            assert blocks.load(["ours"], [found]).wait(30).ok
            assert found == b"a" * 5000
            assert blocks.store(["theirs"], [b"b" * 5000]).wait(30).ok
            assert blocks.delete(["ours"]) == 0, "it is another's"
        """,
        store_root,
    )
    assert done.returncode == 0, done.stderr
    store.maintain()
    found = bytearray(5000)
    assert blocks.load(["theirs"], [found]).wait(30).ok
    assert found == b"b" * 5000


def test_no_thread_is_left_of_a_closed_store(open_store: OpenStore) -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    store = open_store()
    assert len(list(Path("/proc/self/task").iterdir())) > before
    store.close()
    done = threading.Event()
    for _ in range(500):
        # A thread that was joined may be listed for a moment more.
        if len(list(Path("/proc/self/task").iterdir())) <= before:
            break
        done.wait(0.01)
    else:
        raise AssertionError("threads are left")


def test_a_signal_handler_may_drain_a_store(store_root: Path) -> None:
    done = run(
        """
        import signal, sys
        from hoistway import kv
        store = kv.Store(sys.argv[1], capacity="16MiB")
        # What a signal interrupts, which cannot be hit on purpose.
        with store._waiting._lock:
            signal.signal(signal.SIGALRM, lambda *_: print(store.drain_completions()))
            signal.raise_signal(signal.SIGALRM)
        """,
        store_root,
    )
    assert done.stdout == "[]\n", done.stderr
