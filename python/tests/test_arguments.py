"""Paths and names that are none: the error says what was given and what to pass."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import hoistway
import numpy as np
import pytest
from hoistway import kv
from hoistway.distributed._filters import shard_dims, wanted_names
from hoistway.errors import OptionError


class PathOfBytes(os.PathLike):
    def __fspath__(self) -> bytes:
        return b"model.safetensors"


NO_PATHS = [
    (None, "a path cannot be None: pass text or an os.PathLike"),
    (b"model.safetensors", r"a path cannot be b'model.safetensors', which is of type bytes: .*os\.fsdecode"),
    (bytearray(b"m"), "of type bytearray.*os.fsdecode"),
    (memoryview(b"m"), "of type memoryview.*os.fsdecode"),
    (PathOfBytes(), "a path of bytes: pass text, which os.fsdecode"),
    (io.BytesIO(b"contents"), r"of type BytesIO: pass the name of the file; hoistway\.load takes"),
    (3, "a path cannot be 3, which is of type int"),
]

USERS_OF_PATHS: dict[str, Callable[[Any], Any]] = {
    "load_file": hoistway.load_file,
    "open": hoistway.open,
    "iter_tensors": lambda path: list(hoistway.iter_tensors(path)),
    "save_file": lambda path: hoistway.save_file({"a": np.zeros(1)}, path),
    "save_sharded": lambda path: hoistway.save_sharded({"a": np.zeros(1)}, path),
    "doctor": hoistway.doctor,
    "store": lambda root: kv.Store(root, capacity="1GiB"),
    "in a list": lambda path: hoistway.load_file(["m.safetensors", path]),
}


@pytest.mark.parametrize("user", USERS_OF_PATHS)
@pytest.mark.parametrize(("path", "expected"), NO_PATHS, ids=[type(path).__name__ for path, _ in NO_PATHS])
def test_what_is_no_path_is_named_with_what_to_pass(user: str, path: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=expected) as caught:
        USERS_OF_PATHS[user](path)
    assert isinstance(caught.value, hoistway.HoistwayError)


def test_an_open_file_is_no_path(model: Path) -> None:
    with model.open("rb") as file, pytest.raises(TypeError, match="pass the name of the file"):
        hoistway.load_file(file)


@pytest.mark.parametrize("nothing", [[], (), set()], ids=repr)
def test_no_paths_at_all_are_an_error(nothing: Any) -> None:
    for load in (hoistway.load_file, hoistway.open, hoistway.iter_tensors):
        with pytest.raises(
            OptionError, match="there is nothing to load: the list of paths is empty"
        ) as caught:
            load(nothing)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("empty", ["", ["", "m.safetensors"]], ids=repr)
def test_an_empty_path_is_told_what_to_name(empty: Any) -> None:
    for load in (hoistway.load_file, hoistway.open, hoistway.iter_tensors):
        with pytest.raises(FileNotFoundError, match="a path cannot be '': name a file, a folder or a URL"):
            load(empty)


@pytest.mark.parametrize("user", USERS_OF_PATHS)
@pytest.mark.parametrize("kind", [PurePosixPath, PureWindowsPath])
def test_a_url_that_a_path_has_changed_is_told_without_secrets(
    user: str, kind: type[PurePosixPath | PureWindowsPath]
) -> None:
    path = kind("https://me:canary@host/a.safetensors?sig=canary")
    with pytest.raises(OptionError, match="one slash where a URL has two") as caught:
        USERS_OF_PATHS[user](path)
    assert "canary" not in str(caught.value)
    assert "a.safetensors" in str(caught.value)


def test_a_checkpoint_is_no_path(model: Path) -> None:
    checkpoint = hoistway.open(model)
    opened = r"cannot be Checkpoint\(8 tensors in .*: pass a path, or call load\(\)"
    with pytest.raises(TypeError, match=opened):
        hoistway.load_file(checkpoint)  # type: ignore[arg-type]
    checkpoint.close()
    with pytest.raises(TypeError, match=r"a path cannot be Checkpoint\(closed\): pass a path"):
        hoistway.load_file(checkpoint)  # type: ignore[arg-type]


def test_a_framework_is_no_device(model: Path) -> None:
    with pytest.raises(OptionError, match="'numpy', which is a framework: pass framework='numpy'"):
        hoistway.load_file(model, "numpy")


def test_paths_may_be_any_iterable(model: Path) -> None:
    assert len(hoistway.load_file(path for path in (model,))) == 8  # type: ignore[arg-type]
    assert len(hoistway.load_file((str(model),))) == 8


def test_a_path_is_no_data(model: Path) -> None:
    for path in (model, str(model)):
        with pytest.raises(TypeError, match=r"hoistway\.load takes the bytes of a file, load_file its path"):
            hoistway.load(path)  # type: ignore[arg-type]


def test_names_of_tensors_are_text(model: Path) -> None:
    checkpoint = hoistway.open(model)
    wrong = "the name of a tensor cannot be 3, which is of type int: pass text"
    takers: list[Callable[[], Any]] = [
        lambda: checkpoint.get_tensor(3),  # type: ignore[arg-type]
        lambda: checkpoint[3],  # type: ignore[index]
        lambda: checkpoint.get_shape(3),  # type: ignore[arg-type]
        lambda: checkpoint.get_dtype(3),  # type: ignore[arg-type]
        lambda: checkpoint.get_slice(3),  # type: ignore[arg-type]
        lambda: checkpoint.copy_into({3: bytearray(1)}),  # type: ignore[dict-item]
        lambda: hoistway.load_file(model, slices={3: 0}),  # type: ignore[dict-item]
        lambda: hoistway.load_file(model, select=["embed", 3]),  # type: ignore[list-item]
        lambda: hoistway.load_file(model, exclude=["embed", 3]),  # type: ignore[list-item]
        lambda: hoistway.save_file({3: np.zeros(1)}, "m"),  # type: ignore[dict-item]
        lambda: hoistway.save({3: np.zeros(1)}),  # type: ignore[dict-item]
        lambda: wanted_names(["a"], [3], None),  # type: ignore[list-item]
        lambda: shard_dims(["a"], [(1,)], {3: 0}),  # type: ignore[dict-item]
    ]
    for take in takers:
        with pytest.raises(TypeError, match=wrong):
            take()
    assert 3 not in checkpoint


@pytest.mark.parametrize("what", ["select", "exclude"])
@pytest.mark.parametrize("given", [3, b"embed"], ids=repr)
def test_what_selects_is_a_name_or_a_list(what: str, given: Any, model: Path) -> None:
    with pytest.raises(
        TypeError, match=f"{what} cannot be {given!r}, which is of type .*: pass the name of a"
    ):
        hoistway.load_file(model, **{what: given})


def test_metadata_is_text() -> None:
    for metadata in ({"format": 1}, {1: "pt"}, {"format": None}):
        with pytest.raises(TypeError, match=r"metadata cannot hold .*: keys and values are text"):
            hoistway.save({"a": np.zeros(1)}, metadata=metadata)  # type: ignore[arg-type]


@pytest.mark.parametrize("metadata", [[1], 3, "pt"], ids=repr)
def test_metadata_is_a_dictionary(metadata: Any) -> None:
    with pytest.raises(TypeError, match=r"metadata cannot be .*: pass a dictionary of text to text"):
        hoistway.save({"a": np.zeros(1)}, metadata=metadata)


@pytest.mark.parametrize("data", [None, 3, io.BytesIO(b"")], ids=["None", "number", "file"])
def test_load_takes_the_bytes_of_a_file(data: Any) -> None:
    with pytest.raises(TypeError, match=r"data cannot be .*: pass the bytes of a file"):
        hoistway.load(data)


def test_long_values_are_cut_short_in_errors() -> None:
    with pytest.raises(TypeError) as caught:
        hoistway.load_file(b"x" * 100_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300
