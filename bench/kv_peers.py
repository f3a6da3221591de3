"""Fetches the stores that `kv.py` compares with: LMCache, and of vLLM the extension that its tier `fs` uses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "testkit" / "hosts"))

import fetch  # noqa: E402

# Without their dependencies, which are large: this needs torch, numpy, and what `just fetch-hosts` downloads.
PACKAGES = (
    "lmcache==0.5.6",
    "lmcache-rust-raw-block-io==0.5.7rc2",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "caio==0.12.10",
    "cffi==2.1.1",
    "cryptography==50.0.2",
    "llvmlite==0.50.0",
    "numba==0.68.1",
    "nvtx==0.2.17",
    "sortedcontainers==2.4.0",
)


def main(to: Path, hosts: Path) -> None:
    """Fills a directory; `hosts` is the one that `just fetch-hosts` fills."""
    packages, downloads = to / "packages", to / "downloads"
    if not packages.exists():
        fetch.pip("install", "--no-deps", "--target", packages, *PACKAGES)
    extension = hosts / "vllm" / "vllm" / "fs_io_C.abi3.so"
    if not extension.exists():
        archive = fetch.download_vllm(downloads, hosts / "packages")
        with tarfile.open(archive) as sources:
            name = next(name for name in sources.getnames() if name.endswith("/csrc/fs_io.cpp"))
            sources.extract(name, downloads, filter="data")
        include = sysconfig.get_path("include")
        command = [
            "g++",
            "-O3",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{include}",
            downloads / name,
            "-o",
            extension,
        ]
        subprocess.run(command, check=True)
        shutil.rmtree(downloads)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
