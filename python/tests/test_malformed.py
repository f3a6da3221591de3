"""The corpus of bad headers: a typed error each, and never a crash."""

from __future__ import annotations

import os
from pathlib import Path

import hoistway
import pytest
from conftest import header_cases
from hoistway.errors import CheckpointNotFoundError, FormatError, HoistwayError, TruncatedError

CASES = list(header_cases())


def test_there_are_enough_cases() -> None:
    assert sum(error is not None for _, _, error in CASES) >= 60


@pytest.mark.parametrize(("file", "error"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_file_is_read_or_refused(tmp_path: Path, file: bytes, error: str | None) -> None:
    path = tmp_path / "case.safetensors"
    path.write_bytes(file)
    if error is None:
        with hoistway.open(path, framework="raw") as checkpoint:
            assert len(checkpoint.load()) == len(checkpoint)
        return
    with pytest.raises(FormatError) as caught:
        hoistway.load_file(path)
    assert isinstance(caught.value, ValueError)
    assert str(path) in str(caught.value)
    assert Path(caught.value.path) == path
    if error == "Truncated":
        assert isinstance(caught.value, TruncatedError)
        assert caught.value.tensor is not None


def test_things_that_are_no_checkpoints(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path, tmp_path / "*.safetensors"):
        with pytest.raises(CheckpointNotFoundError) as caught:
            hoistway.load_file(path)
        assert isinstance(caught.value, FileNotFoundError)
    index = tmp_path / "model.safetensors.index.json"
    for text in (
        "",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {"a": 1}}',
    ):
        index.write_text(text)
        with pytest.raises(FormatError):
            hoistway.load_file(index)
    index.write_text('{"weight_map": {"a": "missing.safetensors"}}')
    with pytest.raises(CheckpointNotFoundError, match="has tensor 'a' there") as caught:
        hoistway.load_file(tmp_path)
    assert caught.value.path == tmp_path / "missing.safetensors"


def test_a_file_cut_after_opening(model: Path) -> None:
    checkpoint = hoistway.open(model)
    with open(model, "r+b") as file:
        file.truncate(model.stat().st_size - 100_000)
    with pytest.raises(TruncatedError) as caught:
        checkpoint.load()
    assert caught.value.tensor in checkpoint
    assert caught.value.offset >= model.stat().st_size


def test_a_file_rewritten_after_opening(model: Path) -> None:
    checkpoint = hoistway.open(model)
    with open(model, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    with pytest.raises(hoistway.errors.FileChangedError) as caught:
        checkpoint.get_tensor("embed")
    assert isinstance(caught.value, OSError)


def test_every_error_is_a_hoistway_error() -> None:
    for name, value in vars(hoistway.errors).items():
        if name.endswith("Error"):
            assert issubclass(value, HoistwayError)
            assert str(value("what happened", path="p", tensor="t", offset=3)) == "what happened"


def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("pipe.safetensors", "pipe.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(FormatError, match=r"a FIFO \(a named pipe\), not a regular file") as caught:
            hoistway.load_file(tmp_path / name)
        assert caught.value.path == tmp_path / name
    with pytest.raises(FormatError, match="it is a character device, not a regular file"):
        hoistway.load_file("/dev/null")
