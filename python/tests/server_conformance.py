"""What loads from every server must give: what loads from disk give. The tests of each server call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hoistway
from conftest import gguf_cases, header_cases
from hoistway import errors

# `just demo` downloads it, and so do the recipes of servers.
MODEL = Path(__file__).parents[2] / ".demo" / "model" / "model.safetensors"
STRICT_AND_LENIENT = (False, True)

Put = Callable[[str, bytes], object]
"""Stores an object under a name below the URL that loads get."""


def assert_loads_are_those_of_disk(directory: Path, put: Put, url: str, store: hoistway.StoreOptions) -> None:
    """Loads each file of the corpora, and the model of `just demo`, from the server and from disk."""
    good, bad, wrong = 0, 0, []
    for number, (name, files, opened, offset) in enumerate(cases()):
        folder = directory / str(number)
        folder.mkdir(parents=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
            put(f"{number}/{file}", data)
        for lenient in STRICT_AND_LENIENT:
            expected = outcome(f"{folder}/", opened, lenient=lenient, offset=offset)
            found = outcome(f"{url}{number}/", opened, lenient=lenient, offset=offset, store=store)
            good, bad = good + isinstance(expected, dict), bad + isinstance(expected, tuple)
            if found != expected:
                wrong.append(f"{name}, lenient={lenient}: {str(found)[:300]}, not {str(expected)[:300]}")
    assert not wrong, "\n".join(wrong)
    assert good >= 100
    assert bad >= 400
    put("demo/model.safetensors", MODEL.read_bytes())
    found, expected = outcome(f"{url}demo/", "", store=store), outcome(f"{MODEL.parent}/", MODEL.name)
    # It has 91 MB: they are not shown.
    assert isinstance(found, dict), found
    is_same = found == expected
    assert is_same


def cases() -> Iterator[tuple[str, dict[str, bytes], str, int]]:
    """The name of each case, its files, the one to open, and where in it."""
    # No two bytes next to each other are alike.
    for name, file, _ in header_cases(lambda size: bytes(place * 7 % 251 for place in range(size))):
        yield name, {"case.safetensors": file}, "case.safetensors", 0
    for case in gguf_cases():
        yield case.name, case.files, case.open, case.offset


def outcome(
    folder: str, file: str, **options: Any
) -> dict[str, tuple[str, tuple[int, ...], bytes]] | tuple[str, ...]:
    """The type, shape and bytes of each tensor, or what is wrong with which file."""
    try:
        loaded = hoistway.load_file(folder + file, framework="raw", **options)
    except errors.HoistwayError as error:
        # That an object does not exist the store says, and of a file the system.
        message = "" if isinstance(error, errors.CheckpointNotFoundError) else str(error)
        said = (error.path, error.tensor, error.offset, message)
        return type(error).__name__, *(str(part).replace(folder, "") for part in said)
    return {name: (tensor.dtype, tensor.shape, tensor.tobytes()) for name, tensor in loaded.items()}
