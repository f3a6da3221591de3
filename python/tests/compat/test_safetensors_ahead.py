"""Reading ahead by the drop-in: when it is done, what it keeps, and what becomes of files that change meanwhile."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("change", ["truncated", "rewritten"])
def test_what_was_read_ahead_is_an_error_once_the_file_has_changed(small: Path, change: str) -> None:
    with safe_open(small, "pt") as file:
        for name in NAMES[:2]:
            file.get_tensor(name)
        assert file._file._ahead.waiting_bytes == 38 * TENSOR_BYTES
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ahead, "WINDOW_BYTES", 4 * TENSOR_BYTES)
    monkeypatch.setattr(_ahead, "MOST_WAITING_BYTES", 8 * TENSOR_BYTES)
    paths = [
        write_model(tmp_path / f"{seed}", {name: ("F32", [1024]) for name in NAMES}, seed=seed)
        for seed in range(4)
    ]
    # Files of other tests may be open.
    monkeypatch.setattr(_ahead, "_open_files", {})

    def waiting() -> int:
        return sum(ahead.waiting_bytes for ahead in _ahead._open_files.values())

    files = [safe_open(path, "pt") for path in paths]
    whole = [hoistway.load_file(path) for path in paths]
    # One tensor of each window: the others wait, until there is no room.
    for number in range(0, 40, 5):
        for file, expected in zip(files, whole, strict=True):
            assert same_bytes(file.get_tensor(NAMES[number]), expected[NAMES[number]])
            assert waiting() <= 8 * TENSOR_BYTES
    assert waiting() > 0
    for name in reversed(NAMES):
        for file, expected in zip(files, whole, strict=True):
            assert same_bytes(file.get_tensor(name), expected[name])
            assert waiting() <= 8 * TENSOR_BYTES
    del file, files
    assert _ahead._open_files == {}


def test_many_threads_ask_at_once(
    tmp_path: Path, loads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ahead, "WINDOW_BYTES", 8 * TENSOR_BYTES)
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
    with safe_open(small, "np") as file:
        for name in NAMES[:2]:
            file.get_tensor(name)
        # As a thread of the parent has it while it reads.
        with file._file._ahead._lock:
            child = os.fork()
            if child == 0:
                is_right = all(any(file.get_tensor(name).tobytes()) for name in NAMES)
                os._exit(0 if is_right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(any(file.get_tensor(name).tobytes()) for name in NAMES)
