"""Gathers what a machine with a GPU needs to run the suite without a network: wheels of hoistway and its peers."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

LIMIT_BYTES = 60 << 20
PYTHON = "3.12"
PEERS = (
    "fastsafetensors==0.5.0",
    "runai-model-streamer==0.17.0",
    "instanttensor==0.2.2",
    "nvidia-cufile==1.20.0.107",
    # Pure Python, which fastsafetensors and runai-model-streamer import.
    "humanize==4.17.0",
)
# pip takes each of these as it is, and none that is older.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 30, 31, 34, 35)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def main() -> int:
    """Fills the folder that the command line names; 1 if it is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not list(folder.glob("hoistway-*.whl")):
        print(f"there is no wheel of hoistway in {folder}", file=sys.stderr)
        return 1
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    download += ["--disable-pip-version-check", "--implementation", "cp", "--python-version", PYTHON]
    download += [part for platform in PLATFORMS for part in ("--platform", platform)]
    for peer in PEERS:
        done = subprocess.run(
            [*download, "--dest", str(folder), peer], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            print(f"left out: {peer}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    (folder / "commit").write_text(described.stdout.strip() or "unknown")
    files = sorted(folder.iterdir())
    for file in files:
        print(f"{file.stat().st_size / 2**20:7.1f} MiB  {file.name}")
    size = sum(file.stat().st_size for file in files)
    print(f"{size / 2**20:7.1f} MiB in all, of {LIMIT_BYTES / 2**20:.0f} MiB")
    return 0 if size <= LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
