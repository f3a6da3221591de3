"""Prints what this machine has of what tests need, as HOISTWAY_TEST_REQUIRE lists it.

Asks the kernel, not hoistway: what hoistway wrongly believes to be missing must fail its tests.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
IO_URING_SETUP = 425
CACHESTAT = 451
DETACH = 2


def _failed() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def fuse(target: Path) -> None:
    """Mounts a FUSE file system that has no daemon, or finds the program that mounts for other users."""
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    try:
        if os.geteuid() != 0:
            if shutil.which("fusermount3") is None:
                raise FileNotFoundError("fusermount3")
            return
        options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0"
        if LIBC.mount(b"probe", os.fsencode(target), b"fuse", 0, options.encode()) != 0:
            raise _failed()
        LIBC.umount2(os.fsencode(target), DETACH)
    finally:
        os.close(descriptor)


def direct(target: Path) -> None:
    """Writes and reads a block past the page cache."""
    block = mmap.mmap(-1, 4096)
    descriptor = os.open(target / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.pwritev(descriptor, [block], 0)
        os.preadv(descriptor, [block], 0)
    finally:
        os.close(descriptor)
        (target / "probe").unlink()


def io_uring(_: Path) -> None:
    """Sets a ring up."""
    ring = LIBC.syscall(IO_URING_SETUP, 4, ctypes.create_string_buffer(256))
    if ring < 0:
        raise _failed()
    os.close(ring)


def shm(_: Path) -> None:
    """Makes a file in /dev/shm."""
    tempfile.TemporaryFile(dir="/dev/shm").close()


def mount(target: Path) -> None:
    """Mounts a file system in memory, and another one in a mount namespace."""
    subprocess.run(["mount", "-t", "tmpfs", "none", target], check=True, capture_output=True)
    subprocess.run(["umount", target], check=True, capture_output=True)
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", target]
    subprocess.run(command, check=True, capture_output=True)


def cgroup(_: Path) -> None:
    """Puts a child into a control group that limits memory."""
    for root, name in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]:
        group = Path(root, f"hoistway-probe-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(64 << 20))
            script = 'echo $$ > "$1/cgroup.procs" && echo $$ > "$2/cgroup.procs"'
            subprocess.run(["sh", "-c", script, "sh", group, root], check=True, capture_output=True)
        finally:
            group.rmdir()
        return
    raise PermissionError("no control group can be made")


def limits(_: Path) -> None:
    """Raises the hard limit of open files of a child."""
    subprocess.run(["prlimit", f"--nofile=1024:{1 << 29}", "true"], check=True, capture_output=True)


def cxx(_: Path) -> None:
    """Runs the compiler of C++."""
    subprocess.run(["c++", "--version"], check=True, capture_output=True)


def root(target: Path) -> None:
    """Gives a file away."""
    (target / "probe").touch()
    os.chown(target / "probe", 4321, 1234)


def acl(target: Path) -> None:
    """Gives a file an access control list: owner, user 4321, group, mask and others."""
    (target / "probe").touch()
    entries = [(0x01, 6, None), (0x02, 4, 4321), (0x04, 0, None), (0x10, 4, None), (0x20, 0, None)]
    packed = [
        struct.pack("<HHI", tag, rights, 0xFFFFFFFF if user is None else user)
        for tag, rights, user in entries
    ]
    os.setxattr(target / "probe", "system.posix_acl_access", struct.pack("<I", 2) + b"".join(packed))


def cachestat(target: Path) -> None:
    """Asks what the page cache holds of a file."""
    (target / "probe").write_bytes(bytes(4096))
    descriptor = os.open(target / "probe", os.O_RDONLY)
    try:
        whole, answer = struct.pack("<QQ", 0, 4096), ctypes.create_string_buffer(40)
        if LIBC.syscall(CACHESTAT, descriptor, whole, answer, 0) != 0:
            raise _failed()
    finally:
        os.close(descriptor)


PROBES: list[Callable[[Path], None]] = [
    fuse,
    direct,
    io_uring,
    shm,
    mount,
    cgroup,
    limits,
    cxx,
    root,
    acl,
    cachestat,
]


def main() -> None:
    """Prints the names of what works, and to stderr why the rest does not."""
    found = []
    build = Path(__file__).parents[2] / "target"
    build.mkdir(exist_ok=True)
    for probe in PROBES:
        with tempfile.TemporaryDirectory(dir=build) as target:
            try:
                probe(Path(target))
                found.append(probe.__name__)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"this machine lacks {probe.__name__}: {error}", file=sys.stderr)
    print(",".join(found))


if __name__ == "__main__":
    main()
