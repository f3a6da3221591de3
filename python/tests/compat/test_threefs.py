"""Readers with the interface of fastsafetensor_3fs_reader, on a stand-in of 3FS."""

from __future__ import annotations

import ctypes
import json
import logging
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import DAEMON, Daemon, StandIn, run, write_model
from hoistway.compat import threefs
from hoistway.errors import (
    CheckpointNotFoundError,
    FormatError,
    HoistwayError,
    OptionError,
    RouteUnavailableError,
    StorageError,
)
from interrupting import wait_until

SIZE = 5_000_011
BUFFER = 1 << 20

Reader = threefs.ThreeFSFileReader | threefs.MockFileReader


@pytest.fixture
def contents(daemon: Daemon) -> np.ndarray:
    contents = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
    (daemon.root / "data.bin").write_bytes(contents.tobytes())
    return contents


@pytest.fixture
def path(daemon: Daemon, contents) -> str:
    return str(daemon.mount / "data.bin")


@pytest.fixture(params=["native", "mock"])
def make(request: pytest.FixtureRequest, daemon: Daemon) -> Callable[..., Reader]:
    if request.param == "mock":
        return threefs.MockFileReader
    return lambda **options: threefs.ThreeFSFileReader(str(daemon.mount), client="native", **options)


def address(memory: np.ndarray) -> int:
    return memory.ctypes.data


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize(
    "part",
    [
        (0, SIZE, 0),
        (1, 4096, 0),
        (4095, 2, 0),
        (12_345, 3_000_000, 1 << 16),
        (0, SIZE, 100_003),
        (7, SIZE - 7, 1 << 30),
    ],
)
def test_bytes_arrive_at_the_address(make, path, contents, part, pipelined) -> None:
    offset, length, chunk = part
    memory = np.full(length + 2, 0xEE, np.uint8)
    with make(buffer_size=BUFFER) as reader:
        read = reader.read_chunked(path, address(memory) + 1, offset, length, chunk, pipelined=pipelined)
    assert read == length
    np.testing.assert_array_equal(memory[1:-1], contents[offset : offset + length])
    # Nothing before and nothing behind.
    assert memory[0] == memory[-1] == 0xEE


def test_a_read_ends_where_the_file_ends(make, path, contents) -> None:
    memory = np.zeros(200, np.uint8)
    with make() as reader:
        assert reader.read_chunked(path, address(memory), SIZE - 50, 200) == 50
        np.testing.assert_array_equal(memory[:50], contents[-50:])
        assert reader.read_chunked(path, address(memory), SIZE, 200) == 0
        assert reader.read_chunked(path, address(memory), 1 << 40, 200) == 0
        assert reader.read_chunked(path, address(memory), 0, 0) == 0


def test_no_address_reads_and_forgets(make, path) -> None:
    with make() as reader:
        assert (
            reader.read_chunked(path=path, dev_ptr=0, file_offset=3, total_length=SIZE, chunk_size=0)
            == SIZE - 3
        )


def test_the_readers_own_buffer_can_be_read_into(make, path, contents) -> None:
    with make(buffer_size=BUFFER) as reader:
        assert reader.iov_length == BUFFER
        assert reader.read_chunked(path, reader.iov_base, 0, BUFFER) == BUFFER
        assert ctypes.string_at(reader.iov_base, BUFFER) == contents[:BUFFER].tobytes()


@pytest.mark.parametrize("device", [0, 1])
def test_bytes_arrive_on_a_device(make, path, contents, stand_in: StandIn, device) -> None:
    cuda = stand_in.library
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert (
        cuda.cuCtxPushCurrent_v2(context)
        == cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(SIZE))
        == 0
    )
    with make(buffer_size=BUFFER) as reader:
        assert reader.read_chunked(path, pointer.value, 0, SIZE) == SIZE
    memory = np.zeros(SIZE, np.uint8)
    assert cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(address(memory)), pointer, ctypes.c_size_t(SIZE)) == 0
    assert cuda.cuMemFree_v2(pointer) == cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert cuda.cuDevicePrimaryCtxRelease_v2(device) == 0
    np.testing.assert_array_equal(memory, contents)


def test_threads_share_a_reader(make, path, contents) -> None:
    memories = [np.zeros(1_000_000, np.uint8) for _ in range(4)]
    together = threading.Barrier(len(memories))
    with make(buffer_size=BUFFER) as reader:

        def read(number: int) -> None:
            together.wait()
            for _ in range(5):
                reader.read_chunked(path, address(memories[number]), number * 1_000_000, 1_000_000, 1 << 16)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(len(memories))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, memory in enumerate(memories):
        np.testing.assert_array_equal(memory, contents[number * 1_000_000 : (number + 1) * 1_000_000])


def test_headers_are_text_with_lengths(make, daemon: Daemon) -> None:
    paths = []
    for number in range(5):
        tensors = {f"t{number}": ("F32", [number + 1, 3])}
        paths.append(str(daemon.mount / write_model(daemon.root / f"{number}.safetensors", tensors).name))
    with make() as reader:
        headers = reader.read_headers_batch(paths, num_threads=3)
        assert all(reader.has_fd(path) for path in paths)
        assert reader.read_headers_batch([]) == {}
    assert list(headers) == paths
    for number, (text, header_len, file_len) in enumerate(headers.values()):
        assert list(json.loads(text)) == [f"t{number}"]
        assert header_len == 8 + len(text.encode())
        assert file_len == header_len + (number + 1) * 12


@pytest.mark.parametrize("claimed", [100_000_001, 1 << 40, (1 << 64) - 1, 1000])
def test_a_header_longer_than_may_be_is_an_error(make, daemon: Daemon, claimed) -> None:
    (daemon.root / "bad.safetensors").write_bytes(struct.pack("<Q", claimed) + b"{}")
    path = str(daemon.mount / "bad.safetensors")
    with make() as reader, pytest.raises(FormatError, match=str(claimed)) as caught:
        reader.read_headers_batch([path])
    assert str(caught.value.path) == path


def test_a_missing_file_is_an_error_that_names_it(make, daemon: Daemon, path) -> None:
    missing = str(daemon.mount / "missing.safetensors")
    with make() as reader:
        with pytest.raises(CheckpointNotFoundError, match=missing):
            reader.read_chunked(missing, 0, 0, 10)
        with pytest.raises(FileNotFoundError, match=missing):
            reader.read_headers_batch([missing])
        # The reader is as good as before.
        assert reader.read_chunked(path, 0, 0, 10) == 10


def test_a_file_that_was_replaced_is_read_anew(make, daemon: Daemon, path, contents) -> None:
    memory = np.zeros(1000, np.uint8)
    with make() as reader:
        assert reader.read_chunked(path, address(memory), 0, 1000) == 1000
        fresh = daemon.root / "fresh"
        fresh.write_bytes(b"\x07" * 500)
        fresh.replace(daemon.root / "data.bin")
        assert reader.read_chunked(path, address(memory), 0, 1000) == 500
    assert (memory[:500] == 7).all()


def test_closing_twice_is_fine_and_reading_opens_again(make, path, contents) -> None:
    reader = make(buffer_size=BUFFER)
    memory = np.zeros(SIZE, np.uint8)
    assert not reader.has_fd(path)
    assert reader.read_chunked(path, 0, 0, SIZE) == SIZE
    assert reader.has_fd(path)
    reader.close()
    reader.close()
    assert not reader.has_fd(path)
    assert reader.read_chunked(path, address(memory), 0, SIZE) == SIZE
    np.testing.assert_array_equal(memory, contents)
    reader.close()


@pytest.mark.parametrize("options", [{"buffer_size": 0}, {"entries": 0}])
def test_options_that_mean_nothing_are_errors(make, options) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        make(**options)


def test_a_file_elsewhere_is_an_error(daemon: Daemon, path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(bytes(10))
    with threefs.ThreeFSFileReader(str(daemon.mount), client="native") as reader:
        for _ in range(2):
            with pytest.raises(RouteUnavailableError, match=str(elsewhere)):
                reader.read_chunked(str(elsewhere), 0, 0, 10)
        assert reader.read_chunked(path, 0, 0, 10) == 10


def test_an_error_of_the_storage_is_an_error_and_not_zeros(daemon: Daemon, path, contents) -> None:
    memory = np.zeros(SIZE, np.uint8)
    with threefs.ThreeFSFileReader(str(daemon.mount), client="native", buffer_size=BUFFER) as reader:
        assert reader.read_chunked(path, 0, 0, 10) == 10
        daemon.behave("error_every=3")
        with pytest.raises(StorageError, match="a storage server failed") as caught:
            reader.read_chunked(path, address(memory), 0, SIZE)
        assert caught.value.errno == 121
        daemon.behave("error_every=0")
        assert reader.read_chunked(path, address(memory), 0, SIZE) == SIZE
    np.testing.assert_array_equal(memory, contents)


def test_short_answers_are_an_error_and_not_the_end_of_the_file(daemon: Daemon, path) -> None:
    with threefs.ThreeFSFileReader(str(daemon.mount), client="native", buffer_size=BUFFER) as reader:
        assert reader.read_chunked(path, 0, 0, 10) == 10
        daemon.behave("short_every=1")
        with pytest.raises(StorageError, match="twice") as caught:
            reader.read_chunked(path, 0, 0, SIZE)
        assert caught.value.offset is not None


def test_the_death_of_the_daemon_ends_every_read(daemon: Daemon, path) -> None:
    failed = []
    with threefs.ThreeFSFileReader(str(daemon.mount), client="native", buffer_size=BUFFER) as reader:
        assert reader.read_chunked(path, 0, 0, 10) == 10
        daemon.behave("stall=1")

        def read() -> None:
            try:
                reader.read_chunked(path, 0, 0, SIZE)
            except HoistwayError as error:
                failed.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        daemon.kill()
        for thread in threads:
            thread.join()
        with pytest.raises(HoistwayError):
            reader.read_chunked(path, 0, 0, SIZE)
    assert len(failed) == 3
    assert all(str(error.path) == path for error in failed)


@contextmanager
def killed_while_it_reads(daemon: Daemon) -> Iterator[None]:
    """The daemon, which stalls, is killed once a read of the body has reached it."""

    def kill() -> None:
        wait_until(lambda: daemon.transfers() > 0)
        daemon.kill()

    with ThreadPoolExecutor(1) as beside:
        killing = beside.submit(kill)
        yield
        killing.result()


def test_a_mount_that_does_not_answer_is_named(daemon: Daemon, path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(bytes(10))
    with threefs.ThreeFSFileReader(str(daemon.mount), client="native") as reader:
        assert reader.read_chunked(path, 0, 0, 10) == 10
        daemon.kill(unmounts=False)
        try:
            # Whether the file lies on it cannot be known.
            with pytest.raises(StorageError, match="not connected") as of_mount:
                reader.read_chunked(str(elsewhere), 0, 0, 10)
            with pytest.raises(StorageError, match="not connected") as of_file:
                reader.read_chunked(path, 0, 0, 10)
        finally:
            daemon.unmount()
    assert of_mount.value.path == daemon.mount
    assert str(of_file.value.path) == path


@pytest.mark.parametrize("client", ["native", "auto"])
@pytest.mark.parametrize("is_reading", [True, False])
def test_a_reader_goes_on_once_the_file_system_is_mounted_again(
    daemon: Daemon, path, contents, client, is_reading
) -> None:
    memory = np.zeros(SIZE, np.uint8)
    with threefs.ThreeFSFileReader(str(daemon.mount), client=client, buffer_size=BUFFER) as reader:
        for _ in range(2):
            memory[:] = 0
            assert reader.read_chunked(path, address(memory), 0, SIZE) == SIZE
            np.testing.assert_array_equal(memory, contents)
            if is_reading:
                daemon.behave("stall=1")
                with killed_while_it_reads(daemon), pytest.raises(StorageError, match="dead"):
                    reader.read_chunked(path, address(memory), 0, SIZE)
            else:
                daemon.kill()
            with pytest.raises(HoistwayError):
                reader.read_chunked(path, address(memory), 0, SIZE)
            daemon.start()
        assert reader.read_chunked(path, address(memory), 0, SIZE) == SIZE
        # Also if it did not see the one daemon go and the other come.
        daemon.kill()
        daemon.start()
        memory[:] = 0
        assert reader.read_chunked(path, address(memory), 0, SIZE) == SIZE
    np.testing.assert_array_equal(memory, contents)


def test_without_a_3fs_there_is_no_reader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    monkeypatch.delenv("THREEFS_MOUNT_POINT", raising=False)
    with pytest.raises(RouteUnavailableError, match="not on a mounted 3FS"):
        threefs.ThreeFSFileReader(str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        threefs.ThreeFSFileReader(str(tmp_path / "nothing"))
    with pytest.raises(RouteUnavailableError):
        threefs.create_reader("cpp", mount_point=str(tmp_path))
    assert not threefs.is_available(str(tmp_path))
    assert threefs.extract_mount_point(tmp_path) == ""
    with caplog.at_level(logging.WARNING, "hoistway.compat.threefs"):
        reader = threefs.create_reader(mount_point=str(tmp_path))
    assert isinstance(reader, threefs.MockFileReader)
    assert "read without USRBIO" in caplog.text


def test_an_empty_mount_point_is_called_that(tmp_path: Path) -> None:
    # What extract_mount_point gives for a path elsewhere.
    assert threefs.extract_mount_point(tmp_path) == ""
    for make in (
        threefs.ThreeFSFileReader,
        lambda mount_point: threefs.create_reader("cpp", mount_point=mount_point),
    ):
        with pytest.raises(RouteUnavailableError, match="the mount point is empty: extract_mount_point"):
            make("")
    reader = threefs.create_reader("auto", mount_point="")
    assert isinstance(reader, threefs.MockFileReader)


def test_what_is_available_is_what_answers(daemon: Daemon, path, monkeypatch) -> None:
    monkeypatch.delenv("THREEFS_MOUNT_POINT", raising=False)
    monkeypatch.delenv("FASTSAFETENSORS_BACKEND", raising=False)
    mount = str(daemon.mount)
    assert threefs.extract_mount_point(path) == mount
    assert threefs.is_available()
    assert threefs.is_available(mount)
    assert threefs.get_backend() == "cpp"
    with threefs.create_reader(mount_point=mount) as reader:
        assert isinstance(reader, threefs.ThreeFSFileReader)
        assert reader.mount_point == mount
    monkeypatch.setenv("THREEFS_MOUNT_POINT", str(daemon.root))
    assert not threefs.is_available()
    monkeypatch.setenv("FASTSAFETENSORS_BACKEND", "mock")
    assert threefs.get_backend() == "mock"
    monkeypatch.setenv("FASTSAFETENSORS_BACKEND", "fast")
    with pytest.raises(ValueError, match="'fast'"):
        threefs.get_backend()
    with pytest.raises(ValueError, match="'fast'"):
        threefs.create_reader("fast")


def test_the_vendors_library_is_found_where_programs_put_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setenv("HF3FS_LIB_DIR", str(tmp_path))
    assert threefs.get_hf3fs_lib_path() is None
    library = tmp_path / "libhf3fs_api_shared.so.1"
    library.touch()
    assert threefs.get_hf3fs_lib_path() == str(library)


def test_the_vendors_library_that_is_loaded_is_named(tmp_path: Path) -> None:
    library = DAEMON.with_name("libhf3fs_api_shared.so")
    done = run(
        """
        import ctypes, sys
        from hoistway.compat import threefs
        print(threefs.get_hf3fs_lib_path())
        ctypes.CDLL(sys.argv[1])
        print(threefs.get_hf3fs_lib_path())
        """,
        library,
        HF3FS_LIB_DIR=str(tmp_path),
        LD_LIBRARY_PATH="",
    )
    assert done.stdout.splitlines() == ["None", str(library.resolve())], done.stderr
