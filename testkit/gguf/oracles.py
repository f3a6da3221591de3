"""Other parsers of GGUF, each in a process of its own: one that crashes or hangs ends none of the tests.

`ggml` is the parser of llama.cpp, called in the library that a wheel brings or that HOISTWAY_GGML_LIBRARY names; `gguf`
is the Python package. Both give the same plain description of a file, or say that they refuse it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Oracle = Literal["ggml", "gguf"]
Found = dict[str, Any]
"""``verdict``: ``accept``, ``reject``, ``crash`` or ``timeout``; and of accepted files what they hold."""

MEMORY_BYTES = 4 << 30
SCALARS: dict[int, Any] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}
STRING, ARRAY = 8, 9


def ggml_library() -> Path | None:
    """The library with llama.cpp's parser, if there is one."""
    if named := os.environ.get("HOISTWAY_GGML_LIBRARY"):
        return Path(named)
    try:
        files = metadata.files("pywhispercpp") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in files if file.name.startswith("libggml-base")), None)


def describe(oracle: Oracle, paths: Sequence[Path], *, timeout: float = 60) -> list[Found]:
    """What an oracle makes of each file. The time is that for one file."""
    found: list[Found] = []
    while len(found) < len(paths):
        found.extend(_describe_until_crash(oracle, paths[len(found) :], timeout))
    return found


def _describe_until_crash(oracle: Oracle, paths: Sequence[Path], timeout: float) -> Iterator[Found]:
    command = [sys.executable, "-W", "ignore", __file__, oracle]
    # An abort of ggml's would have a debugger print where it happened.
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for path in paths:
            try:
                child.stdin.write(os.fsencode(path) + b"\n")
                child.stdin.flush()
            except BrokenPipeError:
                pass
            watchdog = threading.Timer(timeout, child.kill)
            watchdog.start()
            line = child.stdout.readline()
            in_time = watchdog.is_alive()
            watchdog.cancel()
            if not line:
                yield {"verdict": "crash" if in_time else "timeout"}
                return
            yield json.loads(line)
        child.stdin.close()


def main() -> None:
    """Answers each path on the standard input with a line of JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The libraries print to the standard output too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ask = {"ggml": _ggml, "gguf": _gguf}[sys.argv[1]]()
    for line in sys.stdin.buffer:
        path = os.fsdecode(line.rstrip(b"\n"))
        print(json.dumps(ask(path)), file=answers, flush=True)


def _ggml() -> Callable[[str], Found]:
    path = ggml_library()
    if path is None:
        raise SystemExit("there is no library with ggml's parser")
    library = ctypes.CDLL(str(path))
    context = ctypes.c_void_p
    index = ctypes.c_int64
    signatures = {
        "gguf_init_from_file": (context, [ctypes.c_char_p, _Parameters]),
        "gguf_free": (None, [context]),
        "gguf_get_version": (ctypes.c_uint32, [context]),
        "gguf_get_alignment": (ctypes.c_size_t, [context]),
        "gguf_get_data_offset": (ctypes.c_size_t, [context]),
        "gguf_get_n_kv": (index, [context]),
        "gguf_get_key": (ctypes.c_char_p, [context, index]),
        "gguf_get_kv_type": (ctypes.c_int, [context, index]),
        "gguf_get_arr_type": (ctypes.c_int, [context, index]),
        "gguf_get_arr_n": (ctypes.c_size_t, [context, index]),
        "gguf_get_arr_data": (ctypes.c_void_p, [context, index]),
        "gguf_get_arr_str": (ctypes.c_char_p, [context, index, ctypes.c_size_t]),
        "gguf_get_val_data": (ctypes.c_void_p, [context, index]),
        "gguf_get_val_str": (ctypes.c_char_p, [context, index]),
        "gguf_get_n_tensors": (index, [context]),
        "gguf_get_tensor_offset": (ctypes.c_size_t, [context, index]),
        "gguf_get_tensor_size": (ctypes.c_size_t, [context, index]),
        "ggml_free": (None, [context]),
        "ggml_get_first_tensor": (ctypes.POINTER(_Tensor), [context]),
        "ggml_get_next_tensor": (ctypes.POINTER(_Tensor), [context, ctypes.POINTER(_Tensor)]),
        "ggml_get_name": (ctypes.c_char_p, [ctypes.POINTER(_Tensor)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

    def value(file: int, position: int) -> tuple[int, Any]:
        kind: int = library.gguf_get_kv_type(file, position)
        if kind == STRING:
            return kind, _text(library.gguf_get_val_str(file, position))
        if kind != ARRAY:
            scalar = SCALARS[kind].from_address(library.gguf_get_val_data(file, position))
            return kind, _plain(scalar.value)
        kind, count = library.gguf_get_arr_type(file, position), library.gguf_get_arr_n(file, position)
        if kind == STRING:
            return ARRAY, [_text(library.gguf_get_arr_str(file, position, item)) for item in range(count)]
        if count == 0:
            return ARRAY, []
        array = (SCALARS[kind] * count).from_address(library.gguf_get_arr_data(file, position))
        return ARRAY, [_plain(item) for item in array]

    def describe_file(path: str) -> Found:
        tensors = context()
        file = library.gguf_init_from_file(os.fsencode(path), _Parameters(True, ctypes.pointer(tensors)))
        if not file:
            return {"verdict": "reject"}
        start = library.gguf_get_data_offset(file)
        found = {
            "verdict": "accept",
            "version": library.gguf_get_version(file),
            "alignment": library.gguf_get_alignment(file),
            "metadata": [
                [_text(library.gguf_get_key(file, position)), *value(file, position)]
                for position in range(library.gguf_get_n_kv(file))
            ],
            "tensors": [],
        }
        tensor = library.ggml_get_first_tensor(tensors)
        for position in range(library.gguf_get_n_tensors(file)):
            place = start + library.gguf_get_tensor_offset(file, position)
            size = library.gguf_get_tensor_size(file, position)
            shape = list(reversed(tensor.contents.ne))
            found["tensors"].append(
                [_text(library.ggml_get_name(tensor)), tensor.contents.type, shape, place, size]
            )
            tensor = library.ggml_get_next_tensor(tensors, tensor)
        library.gguf_free(file)
        library.ggml_free(tensors)
        return _with_digests(found, path)

    return describe_file


class _Parameters(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("tensors", ctypes.POINTER(ctypes.c_void_p)))


class _Tensor(ctypes.Structure):
    """The part of ggml's tensors that never changes."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def _gguf() -> Callable[[str], Found]:
    import gguf  # noqa: PLC0415

    def value(field: gguf.ReaderField) -> tuple[int, Any]:
        kind = int(field.types[0])
        if kind == STRING:
            return kind, _text(bytes(field.parts[field.data[0]]))
        if kind != ARRAY:
            return kind, _plain(field.parts[field.data[0]][0].item())
        if field.types[-1] == STRING:
            return kind, [_text(bytes(field.parts[item])) for item in field.data]
        return kind, [_plain(number.item()) for item in field.data for number in field.parts[item]]

    def describe_file(path: str) -> Found:
        try:
            file = gguf.GGUFReader(path)
        except Exception as error:
            return {"verdict": "reject", "why": f"{type(error).__name__}: {error}"[:200]}
        return {
            "verdict": "accept",
            "version": int(file.fields["GGUF.version"].parts[0][0]),
            "alignment": int(file.alignment),
            "metadata": [
                [name, *value(field)] for name, field in file.fields.items() if not name.startswith("GGUF.")
            ],
            "tensors": [
                [
                    tensor.name,
                    int(tensor.tensor_type),
                    [int(size) for size in reversed(tensor.shape)],
                    int(tensor.data_offset),
                    int(tensor.n_bytes),
                    _digest(tensor.data.tobytes()),
                ]
                for tensor in file.tensors
            ],
        }

    return describe_file


def _with_digests(found: Found, path: str) -> Found:
    """With a digest of each tensor's bytes, as far as the file has them."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for tensor in found["tensors"]:
            start, size = tensor[-2:]
            tensor.append(_digest(view[start : start + size]))
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="surrogateescape")


def _plain(value: Any) -> Any:
    """A number as JSON takes it; floats exactly."""
    return value.hex() if isinstance(value, float) else value


if __name__ == "__main__":
    main()
