"""The same programs with fastsafetensor_3fs_reader and with hoistway in its place, on the same mount."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import STAND_IN, Daemon, run, write_model

LIBRARY = STAND_IN.with_name("libhf3fs_api_shared.so")
OURS, THEIRS = "hoistway.compat.threefs", "fastsafetensor_3fs_reader"
SIZE = 3_000_017


@pytest.fixture(autouse=True)
def _needs_their_wheel() -> None:
    if importlib.util.find_spec(THEIRS) is None:
        pytest.skip("fastsafetensor-3fs-reader is not installed")
    if not LIBRARY.exists():
        pytest.skip("the stand-in of its library was not built: just test-python builds it")


@pytest.fixture
def mount(daemon: Daemon) -> Path:
    contents = np.random.default_rng(5).integers(0, 256, SIZE, np.uint8)
    (daemon.root / "data.bin").write_bytes(contents.tobytes())
    for number in range(3):
        write_model(daemon.root / f"{number}.safetensors", {f"t{number}": ("F32", [number + 1, 3])})
    return daemon.mount


def do(module: str, script: str, mount: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program that has its reader's module as `threefs` and the mount as `mount`."""
    start = f"import sys\nimport {module} as threefs\nmount = sys.argv[1]\n"
    directory = str(LIBRARY.parent)
    variables = {"HF3FS_LIB_DIR": directory, "LD_LIBRARY_PATH": directory, "FASTSAFETENSORS_BACKEND": "cpp"}
    return run(start + script, mount, **variables)


SAME = """
import ctypes, hashlib, json
reader = threefs.ThreeFSFileReader(mount_point=mount, buffer_size=1 << 20)
path = mount + "/data.bin"
found = [threefs.is_available(), threefs.get_backend(), threefs.get_hf3fs_lib_path()]
found += [reader.mount_point, reader.iov_base > 0, reader.iov_length, reader.has_fd(path)]
memory = ctypes.create_string_buffer(3_000_017)
for offset, length, chunk in [(0, 3_000_017, 0), (1, 4096, 0), (4095, 2, 0), (777, 2_000_000, 1 << 16),
                              (3_000_000, 100, 0), (3_000_017, 10, 0), (0, 3_000_017, 1 << 18)]:
    for pipelined in (False, True):
        ctypes.memset(memory, 0, len(memory))
        read = reader.read_chunked(path, ctypes.addressof(memory), offset, length, chunk, pipelined)
        found.append([read, hashlib.sha256(memory).hexdigest()])
found.append(reader.read_chunked(path=path, dev_ptr=0, file_offset=5, total_length=1000, chunk_size=0))
found.append(reader.has_fd(path))
paths = [f"{mount}/{number}.safetensors" for number in range(3)]
found.append(sorted(reader.read_headers_batch(paths, num_threads=2).items()))
found.append(reader.read_headers_batch([]))
found.append([reader.has_fd(path) for path in paths])
reader.close()
reader.close()
found.append(reader.has_fd(path))
print(json.dumps(found))
"""


def test_what_works_with_theirs_works_alike_with_ours(mount: Path) -> None:
    theirs, ours = (do(module, SAME, mount) for module in (THEIRS, OURS))
    assert theirs.returncode == ours.returncode == 0, theirs.stderr + ours.stderr
    assert json.loads(ours.stdout) == json.loads(theirs.stdout)


MISSING = """
reader = threefs.ThreeFSFileReader(mount_point=mount)
try:
    reader.read_headers_batch([mount + "/0.safetensors", mount + "/missing.safetensors"])
except FileNotFoundError as error:
    print("missing.safetensors" in str(error))
"""


def test_a_missing_file_ends_their_process_and_is_our_exception(mount: Path) -> None:
    assert do(THEIRS, MISSING, mount).returncode == -signal.SIGABRT
    ours = do(OURS, MISSING, mount)
    assert (ours.returncode, ours.stdout.strip()) == (0, "True"), ours.stderr


THREADS = """
import ctypes, threading
reader = threefs.ThreeFSFileReader(mount_point=mount, buffer_size=1 << 20)
contents = open(mount + "/data.bin", "rb").read()
memories = [ctypes.create_string_buffer(1_000_000) for _ in range(2)]
barrier = threading.Barrier(2)
wrong = []

def read(number):
    barrier.wait()
    for _ in range(20):
        ctypes.memset(memories[number], 0, 1_000_000)
        start = number * 2_000_000
        read = reader.read_chunked(mount + "/data.bin", ctypes.addressof(memories[number]), start, 1_000_000, 1 << 16)
        if read == 1_000_000 and memories[number].raw != contents[start : start + read]:
            wrong.append(number)

threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(wrong))
"""


def test_threads_that_share_our_reader_get_the_right_bytes(mount: Path) -> None:
    # Theirs gives wrong bytes, but not every time.
    ours = do(OURS, THREADS, mount)
    assert (ours.returncode, ours.stdout.strip()) == (0, "0"), ours.stderr


NO_3FS = """
try:
    threefs.ThreeFSFileReader(mount_point=mount)
except RuntimeError as error:
    print(error)
"""


def test_no_3fs_is_an_error_that_says_so(mount: Path, tmp_path: Path) -> None:
    theirs, ours = (do(module, NO_3FS, tmp_path) for module in (THEIRS, OURS))
    assert "failed" in theirs.stdout
    assert f"{tmp_path} is not on a mounted 3FS" in ours.stdout
    assert str(mount) in ours.stdout
