"""The images that hoistway carries of its kernels: one for each architecture, in a folder for each vendor.

``origin.txt`` in each folder names the compilers, and has the SHA-256 of the source and of each image, so that a
machine without the compilers finds a forgotten recompilation.
"""

import argparse
import hashlib
import importlib.util
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEVICE = Path(__file__).resolve().parents[2] / "crates/hoistway-device/src"
SOURCE = DEVICE / "driver" / "kernels.cu"


class CompilerError(Exception):
    """A compiler is absent, is of another version, or refused the source."""


@dataclass(frozen=True)
class Images:
    """The images for the devices of a vendor."""

    folder: Path
    script: str
    """What compiles them."""
    compilers: str

    def architectures(self, pattern: str) -> list[str]:
        """The architectures that the engine has images for: the list is in its source."""
        listed = self.folder.with_suffix(".rs").read_text().partition("images![")[2].partition("]")[0]
        return re.findall(f'"({pattern})"', listed)

    def origin(self) -> str:
        """What the images are made of, for people and for ``--check``."""
        compiled = sorted(path for path in self.folder.iterdir() if path.name != "origin.txt")
        lines = [f"Compiled by testkit/kernels/{self.script} with {self.compilers} of this file, by SHA-256:"]
        lines += [_sum_of(SOURCE), "The results:", *map(_sum_of, compiled)]
        return "\n".join(lines) + "\n"

    def are_of_source(self) -> bool:
        """Whether the images that are kept are all there, unchanged, and made of the source as it is."""
        try:
            return (self.folder / "origin.txt").read_text() == self.origin()
        except FileNotFoundError:
            return False

    def main(self, description: str, compiled: Callable[[], dict[str, bytes]]) -> int:
        """Writes the images, or with ``--check`` says whether they are what the source compiles to."""
        parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        parser.add_argument(
            "--check", action="store_true", help="write nothing; fail if the images are others"
        )
        is_check = parser.parse_args().check
        # Before the compilers are looked for: a machine that lacks them still finds a forgotten recompilation.
        if is_check and not self.are_of_source():
            print(f"{self.folder} was not compiled from {SOURCE} as it is now: run {self.script}.")
            return 1
        try:
            images = compiled()
        except (CompilerError, OSError) as error:
            print(error)
            return 2
        kept = {path.name: path for path in self.folder.glob("*") if path.name != "origin.txt"}
        if is_check:
            same = {name for name, path in kept.items() if images.get(name) == path.read_bytes()}
            changed = sorted((kept.keys() | images.keys()) - same)
            print(f"{', '.join(changed) or 'none'} of {len(images)} differ from what {SOURCE} compiles to.")
            return 1 if changed else 0
        self.folder.mkdir(exist_ok=True)
        for path in kept.values():
            path.unlink()
        for name, image in images.items():
            (self.folder / name).write_bytes(image)
        (self.folder / "origin.txt").write_text(self.origin())
        print(f"Wrote {len(images)} images of {sum(map(len, images.values()))} bytes to {self.folder}.")
        return 0


def _sum_of(path: Path) -> str:
    return f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"


def installed(package: str, file: str, pinned: str) -> Path:
    """A file of a Python package that compiles; ``pinned`` is what to install."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    for folder in (spec and spec.submodule_search_locations) or []:
        if (found := Path(folder, file)).exists():
            return found
    raise CompilerError(f"{package} is not installed: pip install {pinned}.")


def run(command: list[str], folder: Path) -> str:
    """Runs a step of a compiler, and returns what it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompilerError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
