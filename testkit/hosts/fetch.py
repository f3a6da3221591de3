"""Fetches the sources of vLLM and SGLang that the plug-ins are tested on, and the packages that those import.

Nothing of theirs is compiled: loaders, configurations and models are Python, and import without the compiled parts.
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

HERE = Path(__file__).parent
PACKAGES, VLLM, SGLANG = (HERE / name for name in ("requirements.txt", "vllm.txt", "sglang.txt"))


def main(to: Path) -> None:
    """Fills a directory, unless it was filled from the very same inputs."""
    if sys.version_info < (3, 11):
        print("the hosts need Python 3.11; tests on them are skipped")
        return
    inputs = b"".join(path.read_bytes() for path in (Path(__file__), PACKAGES, VLLM, SGLANG))
    state = hashlib.sha256(inputs + sys.version.encode()).hexdigest()
    stamp = to / "stamp"
    if stamp.is_file() and stamp.read_text() == state:
        return
    shutil.rmtree(to, ignore_errors=True)
    packages, downloads = to / "packages", to / "downloads"
    pip("install", "--no-deps", "--target", packages, "--requirement", PACKAGES)
    unpack_vllm(download_vllm(downloads, packages), to / "vllm")
    unpack_sglang(download_sglang(downloads), to / "sglang")
    shutil.rmtree(downloads)
    stamp.write_text(state)


def pip(*arguments: str | Path, **environment: str) -> None:
    """Runs pip."""
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
        env={**os.environ, **environment},
    )


def download_vllm(to: Path, packages: Path) -> Path:
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
        VLLM,
        PYTHONPATH=str(packages),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=version_in(VLLM),
    )
    return next(to.glob("vllm-*.tar.gz"))


def download_sglang(to: Path) -> Path:
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
        SGLANG,
    )
    return next(to.glob("sglang-*.whl"))


def version_in(requirements: Path) -> str:
    """The version that a file of one requirement pins."""
    found = re.search(r"==(\S+)", requirements.read_text())
    if found is None:
        raise ValueError(f"{requirements} pins no version")
    return found[1]


def unpack_vllm(archive: Path, to: Path) -> None:
    """Unpacks the Python, and says that it is a build for processors: vLLM reads that from its version."""
    with tarfile.open(archive) as sources:
        for member in sources.getmembers():
            path = PurePosixPath(member.name)
            if path.parts[1:2] == ("vllm",) and path.suffix == ".py":
                member.name = str(PurePosixPath(*path.parts[1:]))
                sources.extract(member, to, filter="data")
    version = f"{version_in(VLLM)}+cpu"
    information = to / f"vllm-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def unpack_sglang(archive: Path, to: Path) -> None:
    """Unpacks all but the compiled modules."""
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(to, [name for name in wheel.namelist() if not name.endswith(".so")])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
