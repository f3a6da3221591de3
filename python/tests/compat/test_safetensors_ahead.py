"""Reading ahead by the drop-in: when it is done, what it keeps, and what becomes of files that change meanwhile."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hoistway
import hoistway.compat.safetensors as drop_in
import pytest
from conftest import same_bytes, write_model
from hoistway import errors
from hoistway._checkpoint import Checkpoint
from hoistway.compat.safetensors import _ahead, safe_open
from hoistway.compat.safetensors._reports import Account

NAMES = [f"layers.{number}.bias" for number in range(40)]
TENSOR_BYTES = 4096


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """40 tensors of 4 KiB, with one of 32 MiB between them."""
    tensors = {name: ("F32", [1024]) for name in NAMES[:20]}
    tensors["large"] = ("F32", [8192, 1024])
    tensors.update((name, ("F32", [1024])) for name in NAMES[20:])
    return write_model(tmp_path / "small.safetensors", tensors)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names that each load has asked for."""
    asked: list[list[str]] = []
    load = Checkpoint._load_native

    def noted(self: Checkpoint[Any], request: Any, progress: Any = False) -> Any:
        asked.append(request["select"])
        return load(self, request, progress)

    monkeypatch.setattr(Checkpoint, "_load_native", noted)
    return asked


@pytest.mark.parametrize("options", [{}, {"route": "mapped"}, {"huge_pages": "never"}])
def test_neighbours_are_read_by_one_load(
    small: Path, loads: list[list[str]], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hoistway.load_file(small)
    monkeypatch.setattr(safe_open, "_options", options)
    loads.clear()
    with safe_open(small, "pt") as file:
        for name in [*NAMES, "large"]:
            assert same_bytes(file.get_slice(name)[...], whole[name])
    # The first is asked for alone, and the large one is never read ahead.
    assert loads == [NAMES[:1], NAMES[1:], ["large"]]
    report = drop_in.last_report()
    assert (report.tensors, report.tensor_bytes) == (41, sum(tensor.nbytes for tensor in whole.values()))


def test_a_tensor_that_is_asked_for_twice_is_read_twice(small: Path, loads: list[list[str]]) -> None:
    with safe_open(small, "np") as file:
        first = [file.get_tensor(name) for name in NAMES]
        for array in first:
            array[:] = 0
        second = [file.get_tensor(name) for name in NAMES]
    assert all(any(array.tobytes()) for array in second)
    assert loads == [NAMES[:1], NAMES[1:], *([name] for name in NAMES)]


def test_one_tensor_or_parts_of_tensors_read_nothing_ahead(small: Path, loads: list[list[str]]) -> None:
    with safe_open(small, "pt") as file:
        for name in NAMES:
            assert file.get_slice(name)[:7].shape == (7,)
        file.get_tensor(NAMES[3])
    assert [len(names) for names in loads] == [1] * 41


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_budget_of_memory_leaves_no_room_for_it(
    small: Path, loads: list[list[str]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "option":
        monkeypatch.setattr(safe_open, "_options", {"memory_budget": "1GiB"})
    else:
        monkeypatch.setenv("HOISTWAY_MEMORY_BUDGET", "1GiB")
    with safe_open(small, "pt") as file:
        assert all(file.get_tensor(name).nbytes == TENSOR_BYTES for name in NAMES)
    assert loads == [[name] for name in NAMES]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows changes no file that is open")
@pytest.mark.parametrize("change", ["truncated", "rewritten"])
def test_what_was_read_ahead_is_an_error_once_the_file_has_changed(small: Path, change: str) -> None:
    with safe_open(small, "pt") as file:
        for name in NAMES[:2]:
            file.get_tensor(name)
        assert len(file._file._ahead._state.windows[NAMES[2]].waiting) == 38
        if change == "truncated":
            os.truncate(small, 1 << 20)
        else:
            # Another length, as the clock of the file system may not have moved.
            small.write_bytes(small.read_bytes() + b"more")
        for name in (NAMES[2], NAMES[30]):
            with pytest.raises(drop_in.SafetensorError) as caught:
                file.get_tensor(name)
            error = caught.value
            assert isinstance(error, (errors.TruncatedError, errors.FileChangedError))
            assert (str(error.path), error.tensor) == (str(small), name)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows changes no file that is open")
def test_what_was_read_ahead_is_given_out_after_the_file_was_replaced(
    small: Path, loads: list[list[str]]
) -> None:
    whole = hoistway.load_file(small)
    loads.clear()
    with safe_open(small, "pt") as file:
        for name in NAMES[:2]:
            file.get_tensor(name)
        other = write_model(small.with_name("other"), {"t": ("U8", [9])})
        os.replace(other, small)
        assert all(same_bytes(file.get_tensor(name), whole[name]) for name in NAMES[2:])
    assert len(loads) == 2


def test_no_more_waits_than_the_limit_and_nothing_once_files_are_closed(
    tmp_path: Path, loads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ahead, "WINDOW_TENSORS", 4)
    # A window of these takes one block.
    monkeypatch.setattr(_ahead, "MOST_WAITING_BYTES", 2 * _ahead.BLOCK_BYTES)
    # Files of other tests may be open.
    monkeypatch.setattr(_ahead, "_in_memory", {})
    paths = [
        write_model(tmp_path / f"{seed}", {name: ("F32", [1024]) for name in NAMES}, seed=seed)
        for seed in range(4)
    ]
    files = [safe_open(path, "pt") for path in paths]
    whole = [hoistway.load_file(path) for path in paths]
    loads.clear()
    # One tensor of each window: the others wait, until there is no room.
    for number in range(0, 40, 5):
        for file, expected in zip(files, whole, strict=True):
            assert same_bytes(file.get_tensor(NAMES[number]), expected[NAMES[number]])
            assert _ahead.waiting_bytes() <= 2 * _ahead.BLOCK_BYTES
    assert _ahead.waiting_bytes() == 2 * _ahead.BLOCK_BYTES
    assert sum(len(names) > 1 for names in loads) == 2
    for name in reversed(NAMES):
        for file, expected in zip(files, whole, strict=True):
            assert same_bytes(file.get_tensor(name), expected[name])
            assert _ahead.waiting_bytes() <= 2 * _ahead.BLOCK_BYTES
    del file, files
    gc.collect()
    assert _ahead.waiting_bytes() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory the process has")
def test_what_waits_beside_dropped_tensors_takes_no_more_memory_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensor_bytes, tensors = 64 << 10, 4096
    entries = {
        f"t{number:04}": {
            "dtype": "U8",
            "shape": [tensor_bytes],
            "data_offsets": [number * tensor_bytes, (number + 1) * tensor_bytes],
        }
        for number in range(tensors)
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + tensors * tensor_bytes)

    def resident() -> int:
        return int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]

    with safe_open(path, "np") as file:
        before = resident()
        for number, name in enumerate(entries):
            # One in each block of 2 MiB waits.
            if number % 32 != 31:
                file.get_tensor(name)
        # 64 MiB, and what else a process may take meanwhile. The whole file has 256.
        assert resident() - before < 112 << 20


def test_misaligned_tensors_count_with_the_memory_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ahead, "_in_memory", {})
    # Aligned and misaligned in turn: the former keep their distances, and the latter are copied behind them.
    shapes = [("U8", [64 << 10]) if number % 2 else ("F32", [16 << 10]) for number in range(200)]
    tensors = dict(zip((f"t{number:03}" for number in range(200)), shapes, strict=True))
    path = write_model(tmp_path / "m", {"first": ("U8", [1]), **tensors})
    with safe_open(path, "np") as file:
        file.get_tensor("first")
        file.get_tensor("t000")
        window = file._file._ahead._state.windows["t000"]
        assert window.memory_bytes == 14 << 20
        assert _ahead.waiting_bytes() > 16 << 20


def test_a_tensor_that_is_read_in_part_is_not_read_ahead(small: Path, loads: list[list[str]]) -> None:
    with safe_open(small, "pt") as file:
        file.get_slice(NAMES[5])[:7]
        for name in NAMES[:2]:
            file.get_tensor(name)
        window = file._file._ahead._state.windows[NAMES[9]]
        file.get_slice(NAMES[9])[:7]
        assert NAMES[9] not in window.waiting
        assert file.get_tensor(NAMES[9]).nbytes == TENSOR_BYTES
    # The first part was read before anything was divided.
    assert loads == [[NAMES[5]], [NAMES[0]], NAMES[1:], [NAMES[9]], [NAMES[9]]]


def test_a_window_has_no_more_tensors_than_the_limit(tmp_path: Path, loads: list[list[str]]) -> None:
    names = [f"t{number:04}" for number in range(3000)]
    path = write_model(tmp_path / "m", {name: ("U8", [1]) for name in names})
    with safe_open(path, "np") as file:
        assert all(file.get_tensor(name).shape == (1,) for name in names)
    assert [len(asked) for asked in loads] == [1, 1024, 1024, 951]


def test_a_handler_that_interrupts_a_load_may_read_the_same_file(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Checkpoint._load_native
    seen: list[int] = []

    def interrupted(self: Checkpoint[Any], request: Any, progress: Any = False) -> Any:
        if len(request["select"]) > 1:
            # As a signal handler does, or a `__del__`: on the same thread.
            seen.append(file.get_tensor(NAMES[20]).nbytes)
        return load(self, request, progress)

    monkeypatch.setattr(Checkpoint, "_load_native", interrupted)
    with safe_open(small, "np") as file:
        assert all(any(file.get_tensor(name).tobytes()) for name in NAMES)
    assert seen == [TENSOR_BYTES]


def test_an_interrupt_leaves_nothing_counted_and_the_file_usable(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ahead, "_in_memory", {})
    with safe_open(small, "np") as file:
        file.get_tensor(NAMES[0])

        def interrupted(_report: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(file._file._ahead, "_count", interrupted)
            with pytest.raises(KeyboardInterrupt):
                file.get_tensor(NAMES[1])
        assert _ahead.waiting_bytes() == 0
        assert all(any(file.get_tensor(name).tobytes()) for name in NAMES)


def test_what_waits_is_dropped_although_the_log_fails(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ahead, "_in_memory", {})
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def failing(_account: Account) -> None:
        raise ValueError

    monkeypatch.setattr(Account, "close", failing)
    with safe_open(small, "np") as file:
        for name in NAMES[:2]:
            file.get_tensor(name)
        assert _ahead.waiting_bytes() > 0
    gc.collect()
    assert _ahead.waiting_bytes() == 0


def test_many_threads_ask_at_once(
    tmp_path: Path, loads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ahead, "WINDOW_TENSORS", 8)
    path = write_model(tmp_path / "m", {name: ("F32", [1024]) for name in NAMES})
    whole = hoistway.load_file(path)
    for _ in range(20):
        loads.clear()
        with safe_open(path, "pt") as file, ThreadPoolExecutor(8) as pool:
            tensors = list(pool.map(file.get_tensor, NAMES))
        assert all(same_bytes(tensor, whole[name]) for name, tensor in zip(NAMES, tensors, strict=True))
        assert drop_in.last_report().tensors == len(NAMES)
        assert sorted(name for names in loads for name in names) == sorted(NAMES)


def test_a_window_that_cannot_be_read_fails_no_other_tensor(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Checkpoint._load_native

    def refused(self: Checkpoint[Any], request: Any, progress: Any = False) -> Any:
        if NAMES[7] in request["select"]:
            raise errors.StorageError("a bad block")
        return load(self, request, progress)

    monkeypatch.setattr(Checkpoint, "_load_native", refused)
    with safe_open(small, "pt") as file:
        for name in NAMES:
            if name == NAMES[7]:
                with pytest.raises(errors.StorageError, match="a bad block"):
                    file.get_tensor(name)
            else:
                assert file.get_tensor(name).nbytes == TENSOR_BYTES


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_of_fork_reads_by_itself_although_a_thread_was_reading(small: Path) -> None:
    whole = hoistway.load_file(small, framework="numpy")

    def is_right() -> bool:
        # What the parent has waiting is not counted: the child has other windows.
        if _ahead.waiting_bytes() != 0:
            return False
        with ThreadPoolExecutor(8) as pool:
            arrays = list(pool.map(file.get_tensor, NAMES))
        # A window whose last tensor was taken.
        return _ahead.waiting_bytes() == 0 and all(
            array.tobytes() == whole[name].tobytes() for name, array in zip(NAMES, arrays, strict=True)
        )

    with safe_open(small, "np") as file:
        for name in NAMES[:2]:
            file.get_tensor(name)
        state = file._file._ahead._state
        # As a thread of the parent has them while it reads.
        with state.lock, state.windows[NAMES[2]].lock:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if is_right() else 1
                finally:
                    os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(any(file.get_tensor(name).tobytes()) for name in NAMES)
