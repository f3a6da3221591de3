"""The readers: of a 3FS by USRBIO, and of any file system in its stead."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from hoistway import _native
from hoistway._checkpoint import usrbio_directories
from hoistway._lazy import lazy
from hoistway.compat.threefs._interface import FileReaderInterface
from hoistway.errors import RouteUnavailableError

DEFAULT_BUFFER_BYTES = 64 << 20


class _Reader(FileReaderInterface):
    """Common code of both readers: all but the file system."""

    def __init__(self, native: _native.ChunkReader, mount_point: str, buffer_size: int) -> None:
        self._native = native
        self._mount_point = mount_point
        self._buffer_size = buffer_size

    @property
    def mount_point(self) -> str:
        """The mount point of the file system, as it was given."""
        return self._mount_point

    @property
    def iov_base(self) -> int:
        """Address of a buffer of `iov_length` bytes to read into. It is made when first asked for."""
        return ctypes.addressof(self._own_buffer)

    @property
    def iov_length(self) -> int:
        """Length of the buffer, and how many bytes are in flight at most."""
        return self._buffer_size

    @lazy
    def _own_buffer(self) -> ctypes.Array[ctypes.c_char]:
        # Holds the mapping, of which only what is written takes memory.
        return (ctypes.c_char * self._buffer_size).from_buffer(mmap.mmap(-1, self._buffer_size))

    def has_fd(self, path: str) -> bool:
        """Whether this file is open."""
        return self._native.has_file(path)

    def read_chunked(  # noqa: PLR0917
        self,
        path: str,
        dev_ptr: int,
        file_offset: int,
        total_length: int,
        chunk_size: int = 0,
        pipelined: bool = True,
        *,
        stream: int | None = None,
    ) -> int:
        """Reads part of a file; see `FileReaderInterface.read_chunked`.

        Raises:
            hoistway.errors.HoistwayError: What went wrong, with path and offset. What lies at ``dev_ptr`` then is worth
                nothing.
        """
        return self._native.read(
            os.fspath(path), dev_ptr, file_offset, total_length, max(chunk_size, 0), stream
        )

    def read_headers_batch(self, paths: list[str], num_threads: int = 8) -> dict[str, tuple[str, int, int]]:
        """Reads headers; see `FileReaderInterface.read_headers_batch`.

        Raises:
            hoistway.errors.HoistwayError: A file is missing, or its header is none: longer than 100 MB or than the
                file, or no text.
        """
        texts = self._native.header_texts([os.fspath(path) for path in paths], max(num_threads, 1))
        return dict(zip(paths, texts, strict=True))

    def close(self) -> None:
        """Closes files, rings and memory shared with the daemon. Another read opens them again.

        Raises:
            hoistway.errors.DeviceUnavailableError: It is unknown whether a device still writes to the memory of a read
                that has failed. Keep that memory, and close again.
        """
        self._native.close()


class ThreeFSFileReader(_Reader):
    """Reads files of one 3FS by USRBIO. Threads may share it.

    Args:
        mount_point: Where the 3FS is mounted.
        entries: Most reads in flight.
        io_depth: Taken for the sake of programs that give it. The daemon answers each read by itself.
        buffer_size: Bytes in flight at most, which is the length of the memory shared with the daemon.
        client: Who speaks to the daemon: ``native`` is hoistway itself, ``vendor`` the vendor's library, ``auto`` that
            library if there is one that works, else hoistway.
        _options: Others are ignored, as that library does.

    Raises:
        hoistway.errors.RouteUnavailableError: There is no 3FS, or it cannot be read from by USRBIO.
    """

    def __init__(
        self,
        mount_point: str,
        entries: int = 64,
        io_depth: int = 0,
        buffer_size: int = DEFAULT_BUFFER_BYTES,
        *,
        client: str = "auto",
        **_options: Any,
    ) -> None:
        if not os.fspath(mount_point):
            raise RouteUnavailableError(
                "the mount point is empty: extract_mount_point gives that of a path which lies on no 3FS; name the "
                "directory that a 3FS is mounted at, or read files elsewhere by MockFileReader"
            )
        directories = usrbio_directories() or []
        point = os.fspath(mount_point)
        native = _native.ChunkReader(point, entries, buffer_size, client, directories)
        super().__init__(native, mount_point, buffer_size)


ThreeFSFileReaderCpp = ThreeFSFileReader
ThreeFSFileReaderPy = ThreeFSFileReader


class MockFileReader(_Reader):
    """Reads files wherever they lie, without USRBIO. Takes the arguments of `ThreeFSFileReader`."""

    def __init__(
        self,
        mount_point: str = "",
        entries: int = 64,
        io_depth: int = 0,
        buffer_size: int = DEFAULT_BUFFER_BYTES,
        **_options: Any,
    ) -> None:
        native = _native.ChunkReader(None, entries, buffer_size, "auto", [])
        super().__init__(native, mount_point, buffer_size)
