"""Fetches the sources of the hosts that plug-ins and adapters are tested on, and the packages that those import.

Nothing of theirs is compiled: what is tested is Python, and imports without the compiled parts. Two modules that no
test needs, but that LMCache and UCM import, are replaced by a few lines.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

# Debian 12's Python 3.11.2 has no filters yet.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

HERE = Path(__file__).parent
PACKAGES = HERE / "requirements.txt"
HOSTS = [HERE / f"{name}.txt" for name in ("vllm", "sglang", "lmcache", "ucm")]

# What LMCache asks of numba when it is imported: a compiler of kernels that the tests do not run.
NUMBA = """
def njit(*arguments, **options):
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function

prange = range
"""
# What UCM asks of its logger, which is compiled for one version of Python.
UCM_LOGGER = """
from enum import IntEnum

Level = IntEnum("Level", ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], start=0)

def setup(path, max_files, max_size): pass
def flush(): pass
def log(level, file, function, line, message): pass
log_rate_limit = log
"""


def main(to: Path) -> None:
    """Fills a directory, unless it was filled from the very same inputs."""
    if sys.version_info < (3, 11):
        print("the hosts need Python 3.11; tests on them are skipped")
        return
    inputs = b"".join(path.read_bytes() for path in (Path(__file__), PACKAGES, *HOSTS))
    state = hashlib.sha256(inputs + sys.version.encode()).hexdigest()
    stamp = to / "stamp"
    if stamp.is_file() and stamp.read_text() == state:
        return
    shutil.rmtree(to, ignore_errors=True)
    packages, downloads = to / "packages", to / "downloads"
    pip("install", "--no-deps", "--target", packages, "--requirement", PACKAGES)
    for pin in HOSTS:
        fetch(pin, downloads / pin.stem, packages, to / pin.stem)
    shutil.rmtree(downloads)
    stamp.write_text(state)


def fetch(pin: Path, downloads: Path, packages: Path, to: Path) -> None:
    """Unpacks what tests need of the version of a host that a file pins; the file's name begins with the host's."""
    host = pin.stem.partition("-")[0]
    if host == "vllm":
        unpack_vllm(download_vllm(pin, downloads, packages), to, version_in(pin))
    elif host == "sglang":
        unpack_sglang(download_sglang(pin, downloads), to)
    elif host == "lmcache":
        unpack_lmcache(*download_lmcache(pin, downloads, packages), to)
    else:
        unpack_ucm(download_ucm(pin, downloads), to)


def pip(*arguments: str | Path, **environment: str) -> None:
    """Runs pip."""
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
        env={**os.environ, **environment},
    )


def download_vllm(pin: Path, to: Path, packages: Path) -> Path:
    """Of vLLM the sources: its wheel is seven times as large."""
    # pip asks for the metadata, and so runs the build script, which compiles nothing for no device.
    pip(
        "download",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary=vllm",
        "--dest",
        to,
        "--require-hashes",
        "--requirement",
        pin,
        PYTHONPATH=str(packages),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=version_in(pin),
    )
    return next(to.glob("vllm-*.tar.gz"))


def download_sglang(pin: Path, to: Path) -> Path:
    """Of SGLang a wheel: its releases have no sources. Which one does not matter, the Python in them is the same."""
    pip(
        "download",
        "--no-deps",
        "--only-binary=sglang",
        "--platform=manylinux_2_34_x86_64",
        "--python-version=3.11",
        "--dest",
        to,
        "--require-hashes",
        "--requirement",
        pin,
    )
    return next(to.glob("sglang-*.whl"))


def download_lmcache(pin: Path, to: Path, packages: Path) -> tuple[Path, Path]:
    """Of LMCache a wheel, for the one compiled module that its adapters need, and the sources, for its tests."""
    pinned = ("--no-deps", "--dest", to, "--require-hashes", "--requirement", pin)
    pip("download", "--only-binary=lmcache", *pinned)
    # As with vLLM: the metadata are asked for, and nothing is compiled for them.
    pip(
        "download",
        "--no-build-isolation",
        "--no-binary=lmcache",
        *pinned,
        PYTHONPATH=str(packages),
        NO_NATIVE_EXT="1",
    )
    return next(to.glob("lmcache-*.whl")), next(to.glob("lmcache-*.tar.gz"))


def download_ucm(pin: Path, to: Path) -> Path:
    """Of UCM a wheel: its releases have no sources, and the Python in all of them is the same."""
    pip(
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--platform=manylinux_2_28_x86_64",
        "--python-version=3.12",
        "--dest",
        to,
        "--require-hashes",
        "--requirement",
        pin,
    )
    return next(to.glob("uc_manager*.whl"))


def version_in(requirements: Path) -> str:
    """The version that a file of one requirement pins."""
    found = re.search(r"==(\S+)", requirements.read_text())
    if found is None:
        raise ValueError(f"{requirements} pins no version")
    return found[1]


def unpack_vllm(archive: Path, to: Path, version: str) -> None:
    """Unpacks the Python, and says that it is a build for processors: vLLM reads that from its version."""
    with tarfile.open(archive) as sources:
        for member in sources.getmembers():
            path = PurePosixPath(member.name)
            if path.parts[1:2] == ("vllm",) and path.suffix == ".py":
                member.name = str(PurePosixPath(*path.parts[1:]))
                sources.extract(member, to, **SAFELY)
    version = f"{version}+cpu"
    information = to / f"vllm-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def unpack_sglang(archive: Path, to: Path) -> None:
    """Unpacks all but the compiled modules."""
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(to, [name for name in wheel.namelist() if not name.endswith(".so")])


def unpack_lmcache(archive: Path, sources: Path, to: Path) -> None:
    """Unpacks the Python and one compiled module, and the tests of what adapters plug into."""
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(
            to,
            [
                name
                for name in wheel.namelist()
                if not name.endswith(".so") or name.startswith("lmcache/lmcache_native.")
            ],
        )
    (to / "numba.py").write_text(NUMBA)
    folder = ("tests", "v1", "distributed")
    names = ("__init__.py", "conftest.py", "test_native_connector_l2_adapter.py")
    with tarfile.open(sources) as files:
        for member in files.getmembers():
            path = PurePosixPath(member.name)
            if path.parts[1:-1] == folder and path.name in names:
                member.name = str(PurePosixPath(*path.parts[1:]))
                files.extract(member, to, **SAFELY)


def unpack_ucm(archive: Path, to: Path) -> None:
    """Unpacks the package without its compiled modules, and not its hook into every interpreter."""
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(
            to, [name for name in wheel.namelist() if name.startswith("ucm/") and not name.endswith(".so")]
        )
    (to / "ucm" / "shared" / "infra" / "ucmlogger.py").write_text(UCM_LOGGER)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
