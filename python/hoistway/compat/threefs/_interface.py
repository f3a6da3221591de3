"""The interface of readers of parts of files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class FileReaderInterface(ABC):
    """Reads parts of files, by their paths, to addresses. Files that were read stay open until `close`."""

    @abstractmethod
    def read_chunked(  # noqa: PLR0917
        self,
        path: str,
        dev_ptr: int,
        file_offset: int,
        total_length: int,
        chunk_size: int = 0,
        pipelined: bool = False,
        *,
        stream: int | None = None,
    ) -> int:
        """Reads part of a file.

        Args:
            path: The file.
            dev_ptr: Where the bytes go: an address of the host or of a CUDA device. No other code may use the bytes
                during the call. 0 reads and discards.
            file_offset: Where in the file to begin.
            total_length: How many bytes to read.
            chunk_size: Longest single read; 0 leaves it to the reader.
            pipelined: Taken for the sake of programs that give it. Reading and copying always overlap.
            stream: A stream of the device, as ``torch.cuda.Stream.cuda_stream`` gives it. Bytes get to the device after
                what is queued there by now. Without it they come after the legacy default stream.

        Returns:
            How many bytes were read: fewer than asked for only where the file ends.
        """

    @abstractmethod
    def read_headers_batch(self, paths: list[str], num_threads: int = 8) -> dict[str, tuple[str, int, int]]:
        """Reads the headers of safetensors files.

        Returns:
            For each path the header, its length with the 8 bytes before it, and the length of the file.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes files and frees memory."""

    def __enter__(self) -> Self:
        """The reader itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()
