"""The interface of `fastsafetensor_3fs_reader`: parts of files on a 3FS, read to memory that the caller has.

Change the import, keep the program::

    from hoistway.compat.threefs import ThreeFSFileReader, extract_mount_point

    with ThreeFSFileReader(extract_mount_point(path)) as reader:
        read = reader.read_chunked(path, buffer.data_ptr(), offset, buffer.nbytes)

What differs: many reads are in flight at once; threads may share a reader; what that library ends the process for, or
reads wrongly, is an exception of `hoistway.errors`; and no vendor library is needed.
"""

import sys

if sys.platform != "linux":
    raise ImportError("hoistway.compat.threefs: 3FS is read on Linux only", name=__name__)

from hoistway.compat.threefs._backend import (
    create_reader,
    extract_mount_point,
    get_backend,
    get_hf3fs_lib_path,
    is_available,
)
from hoistway.compat.threefs._interface import FileReaderInterface
from hoistway.compat.threefs._readers import (
    MockFileReader,
    ThreeFSFileReader,
    ThreeFSFileReaderCpp,
    ThreeFSFileReaderPy,
)

__all__ = [
    "FileReaderInterface",
    "MockFileReader",
    "ThreeFSFileReader",
    "ThreeFSFileReaderCpp",
    "ThreeFSFileReaderPy",
    "create_reader",
    "extract_mount_point",
    "get_backend",
    "get_hf3fs_lib_path",
    "is_available",
]
