"""What the tests share: models made by the reference library or by hand."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hoistway
import numpy as np
import pytest
from hoistway import kv

CORPUS = Path(__file__).parents[2] / "testkit" / "corpus"
# The writer of GGUF files, their corpus and other parsers.
sys.path.append(str(Path(__file__).parents[2] / "testkit" / "gguf"))

STAND_IN = Path(__file__).parents[2] / "target" / "debug" / "libfake_cuda.so"
# Named before anything asks for a device. Only a package built with the feature stand-in listens.
for variable in ("HOISTWAY_CUDA_DRIVER", "HOISTWAY_CUFILE", "HOISTWAY_HIP_DRIVER"):
    os.environ[variable] = str(STAND_IN)
os.environ.setdefault("FAKE_CUDA_CUFILE_MODE", "nvfs")

LONGEST = [
    "test_rank_failures.py",
    "test_cancel.py",
    "test_copy_into.py",
    "test_run.py",
    "test_differential.py",
    "test_process.py",
    "test_safetensors_upstream.py",
    "test_gpu_checks.py",
    "test_fastsafetensors_ranks.py",
]
"""The files whose tests take the longest together: a process has all tests of a file."""

BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["C64", "F64", "I64", "U64"], 64),
}

WriteModel = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first: one that begins late leaves the other processes without work."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def write_model(
    path: Path, tensors: dict[str, tuple[str, list[int]]], *, padding: int = 0, metadata=None, seed: int = 0
) -> Path:
    """Writes a file of (dtype, shape) tensors of random bytes; BOOL ones of zeros and ones."""
    generator = np.random.default_rng(seed)
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = []
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        values = generator.integers(0, 2 if dtype == "BOOL" else 256, size, np.uint8)
        data.append(values.tobytes())
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    return path


OBJECTD = STAND_IN.with_name("objectd")


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[str]:
    """The URL of a server that has the files of a directory."""
    with subprocess.Popen(
        [OBJECTD, directory, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


DAEMON = STAND_IN.with_name("usrbiod")


def skip(requirement: str, why: str) -> NoReturn:
    """Skips the test, or fails it if ``HOISTWAY_TEST_REQUIRE`` lists what the machine lacks."""
    required = os.environ.get("HOISTWAY_TEST_REQUIRE", "").split(",")
    if requirement in map(str.strip, required):
        pytest.fail(f"lacks {requirement}, which HOISTWAY_TEST_REQUIRE requires: {why}")
    pytest.skip(f"lacks {requirement}: {why}")


class Daemon:
    """A mounted stand-in of the daemon of 3FS, and the directory that it serves: see testkit/usrbiod."""

    def __init__(self, root: Path, mount: Path) -> None:
        self.mount = mount
        self.root = root
        self.start()

    def start(self) -> None:
        """Starts the daemon, which mounts: after it was killed, another one at the same place."""
        self._process = subprocess.Popen(
            [DAEMON, self.root, self.mount], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        if self._answers.readline().strip() != "ready":
            self.close()
            skip("fuse", "nothing can be mounted here")

    def behave(self, *faults: str) -> None:
        """Sets the daemon's faults."""
        self._command(" ".join(["behave", *faults]))

    def transfers(self) -> int:
        """How many transfers there were since the last `behave`."""
        return int(self._command("transfers"))

    def _command(self, command: str) -> str:
        self._commands.write(command + "\n")
        self._commands.flush()
        answer = self._answers.readline()
        assert answer.startswith("ok"), answer
        return answer.removeprefix("ok")

    def kill(self, *, unmounts: bool = True) -> None:
        """Kills the daemon, and takes the mount away unless that is left to `unmount`."""
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._answers.close()
        if unmounts:
            self.unmount()

    def unmount(self) -> None:
        """Takes the mount of a daemon away that was killed."""
        subprocess.run(["umount", "--lazy", self.mount], check=True)

    def close(self) -> None:
        """Lets the daemon end, which unmounts."""
        self._commands.close()
        self._process.wait()
        self._answers.close()


class StandIn:
    """The stand-in driver of this process, and its controls: see testkit/fake-cuda."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(STAND_IN))
        self.library.fake_cuda_count.restype = ctypes.c_uint64

    def set(self, setting: str) -> None:
        """Sets ``KEY=VALUE``. Devices that nothing uses are opened anew after that."""
        hoistway.release_devices()
        assert self.library.fake_cuda_configure(setting.encode()) == 0, setting

    def lend(self, size: int) -> tuple[int, int, Lent]:
        """Memory of the first device, as torch's allocator would lend it: address, stream, and owner."""
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.library.cuCtxPushCurrent_v2(context) == 0
        assert self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        assert self.library.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
        return address.value, 0, Lent(self.library, address.value)

    def count(self, name: str) -> int:
        """How many of these there are."""
        return self.library.fake_cuda_count(name.encode())

    def left(self, name: str) -> int:
        """How many of these there are once devices that nothing uses are released."""
        hoistway.release_devices()
        return self.count(name)


class Lent:
    """Memory of a device that an allocator gave."""

    alive = 0

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self.library, self.address = library, address
        Lent.alive += 1

    def __del__(self) -> None:
        Lent.alive -= 1
        context = ctypes.c_void_p()
        self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self.library.cuCtxPushCurrent_v2(context)
        assert self.library.cuMemFree_v2(ctypes.c_uint64(self.address)) == 0
        self.library.cuCtxPopCurrent_v2(ctypes.byref(context))
        self.library.cuDevicePrimaryCtxRelease_v2(0)
        self.library.cuDevicePrimaryCtxRelease_v2(0)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """Devices: two of CUDA's and two of ROCm's, of the stand-in driver, which must be empty again after the test."""
    driver = StandIn()
    driver.library.fake_cuda_reset()
    with_interpreter = driver.count("calls_under_interpreter")
    yield driver
    driver.library.fake_cuda_reset()
    gc.collect()
    assert driver.count("calls_under_interpreter") == with_interpreter, "other threads stand still meanwhile"
    assert driver.left("device_bytes") == driver.count("pinned_bytes") == driver.count("streams") == 0


SMALL_STORE = {"capacity": "256MiB", "segment_bytes": "16MiB", "min_free": 0}
"""Options of a KV store for a test."""

OpenStore = Callable[..., kv.Store]


@pytest.fixture
def store_root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_store(store_root: Path) -> Iterator[OpenStore]:
    """Opens the KV store of the test; all are closed after it."""
    opened: list[kv.Store] = []

    def open_store(**options: Any) -> kv.Store:
        opened.append(kv.Store(store_root, **{**SMALL_STORE, **options}))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> kv.Store:
    return open_store()


@pytest.fixture
def blocks(store: kv.Store) -> kv.Namespace:
    return store.namespace(model="test")


def random_bytes(size: int) -> bytearray:
    return bytearray(os.urandom(size))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        skip("fuse", "/dev/fuse cannot be opened")
    if not DAEMON.exists():
        skip("fuse", "the stand-in was not built: just test-python builds it")
    root, mount = tmp_path / "root", tmp_path / "mount"
    root.mkdir()
    mount.mkdir()
    daemon = Daemon(root, mount)
    yield daemon
    daemon.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of a few megabytes with tensors of several types and sizes."""
    tensors = {
        "embed": ("F32", [1000, 64]),
        "layers.0.weight": ("BF16", [512, 1024]),
        "layers.0.bias": ("BF16", [512]),
        "layers.1.weight": ("F16", [512, 1024]),
        "ids": ("I64", [3, 5]),
        "scalar": ("F32", []),
        "empty": ("F32", [0, 4]),
        "flags": ("BOOL", [17]),
    }
    return write_model(tmp_path / "model.safetensors", tensors, metadata={"format": "pt", "note": "test"})


def same_bytes(a, b) -> bool:
    """Whether two torch tensors are of one type and shape and hold the same bytes, NaNs included."""
    import torch  # noqa: PLC0415

    def raw(tensor) -> bytes:
        flat = tensor.flatten().clone(memory_format=torch.contiguous_format)
        return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""

    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def thread_count() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def assert_threads_end(before: int) -> None:
    """Fails unless no more threads than ``before`` are left. One that was joined may be listed for a moment more."""
    deadline = time.monotonic() + 30
    while thread_count() > before:
        assert time.monotonic() < deadline, "threads are left"
        time.sleep(0.01)


def make_cold(path: Path) -> None:
    """Drops a file from the page cache."""
    import os  # noqa: PLC0415

    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def run(
    script: str, *arguments: object, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


def header_cases(data: Callable[[int], bytes] = bytes) -> Iterator[tuple[str, bytes, str | None]]:
    """Name, contents and expected error of each file of the corpus of headers. ``data`` gives the bytes of tensors."""

    def text_of(header) -> str:
        if isinstance(header, str):
            return header
        if isinstance(header, list):
            return "".join(text_of(part) for part in header)
        return header["repeat"] * header["times"]

    for case in json.loads((CORPUS / "headers.json").read_text()):
        if "file_hex" in case:
            file = bytes.fromhex(case["file_hex"])
        else:
            header = (
                bytes.fromhex(case["header_hex"])
                if "header_hex" in case
                else text_of(case["header"]).encode()
            )
            file = struct.pack("<Q", len(header)) + header + data(case["data_bytes"])
        yield case["name"], file, case["error"]


class GgufCase(NamedTuple):
    """A case of the corpus of GGUF files; see its README."""

    name: str
    files: dict[str, bytes]
    open: str
    offset: int
    errors: dict[bool, str | None]
    """What happens when it is opened leniently, or not."""
    tensors: list[tuple[str, str, list[int], int, int]] | None
    others: dict[str, dict[str, str]]

    def write(self, directory: Path) -> Path:
        """Writes its files and returns the one to open."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (directory / name).write_bytes(data)
        return directory / self.open


def gguf_cases() -> Iterator[GgufCase]:
    """The corpus of GGUF files."""

    def part(part: str | list) -> bytes:
        return bytes.fromhex(part) if isinstance(part, str) else bytes.fromhex(part[0]) * part[1]

    for case in json.loads((CORPUS / "gguf.json").read_text()):
        yield GgufCase(
            case["name"],
            {name: b"".join(map(part, parts)) for name, parts in case["files"].items()},
            case["open"],
            case.get("offset", 0),
            {False: case["error"], True: case.get("lenient", case["error"])},
            case.get("tensors"),
            case.get("others", {}),
        )
