"""Builds llama.cpp, stock and patched, with the programs that tests and benchmark run.

The sources are those of llama-cpp-python's source distribution, for the processor only. What is built stays in
bench/data, which git ignores, and is built again only where something changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Debian 12's Python 3.11.2 has no filters yet.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VERSION = "0.3.36"
DATA = ROOT / "bench/data" / f"llama-cpp-python-{VERSION}"
# Where `just capi` installs the C library.
HOISTWAY = ROOT / "dist/capi"
LIBRARY = HOISTWAY / "lib/libhoistway.so"


@dataclass(frozen=True)
class Build:
    """Where the programs of one build are."""

    folder: Path

    @property
    def logits(self) -> Path:
        """Loads and evaluates a model by llama.cpp's usual call."""
        return self.folder / "logits"

    @property
    def load_from_user(self) -> Path:
        """The example: loads by `llama_model_init_from_user`."""
        return self.folder / "load-from-user"

    @property
    def stream_experts(self) -> Path:
        """Evaluates a model whose experts are read as its routers choose them."""
        return self.folder / "stream-experts/stream-experts"

    @property
    def beside(self) -> Path:
        """Opens a catalog, linked statically with the patch's files too; of the patched build alone."""
        return self.folder / "beside"

    @property
    def llama_server(self) -> Path:
        """llama.cpp's server, which `build_server` builds."""
        return self.folder / "bin/llama-server"

    @property
    def stand_in(self) -> Path:
        """A library with hoistway's functions and plain reads, for what hoistway itself does not do."""
        return self.folder / "libstand-in.so"

    @property
    def every_tenth_fails(self) -> Path:
        """A library that passes on what it is asked, and fails every tenth read."""
        return self.folder / "libevery-tenth-fails.so"


def build(patched: bool) -> Build:
    """Builds stock or patched sources and the programs."""
    kind = "patched" if patched else "stock"
    source = patched_tree() if patched else tree(kind)
    folder = DATA / f"build-{kind}"
    if not LIBRARY.is_file():
        raise SystemExit(f"{LIBRARY} is missing: 'just capi' makes it")
    configure = ["cmake", "-G", "Ninja", "-S", HERE / "test", "-B", folder]
    quietly([*configure, f"-DLLAMA_SOURCE={source}", f"-DHOISTWAY={HOISTWAY}"])
    quietly(["cmake", "--build", folder])
    return Build(folder)


def build_server() -> Build:
    """Builds the patched sources with llama.cpp's server, which takes longer than all others together."""
    built = build(patched=True)
    quietly(["cmake", "--build", built.folder, "--target", "llama-server"])
    return built


def patched_tree() -> Path:
    """Sources with hoistway, as a user makes them."""
    source = tree("patched")
    command = [sys.executable, HERE / "apply.py", source]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        # It has another version of the patch.
        shutil.rmtree(source)
        source = tree("patched")
        quietly(command)
    return source


def tree(name: str) -> Path:
    """The sources of llama.cpp as they were published."""
    target = DATA / name
    if not target.is_dir():
        unpacked = DATA / f"{name}.part"
        shutil.rmtree(unpacked, ignore_errors=True)
        inside = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
        with tarfile.open(sdist()) as archive:
            for member in archive:
                # A .git without its repository makes git complain.
                if member.name.startswith(inside) and not member.name.endswith("/.git"):
                    member.name = member.name.removeprefix(inside)
                    archive.extract(member, unpacked, **SAFELY)
        unpacked.rename(target)
    return target


def sdist() -> Path:
    """The source distribution, downloaded once."""
    path = DATA / f"llama_cpp_python-{VERSION}.tar.gz"
    if not path.is_file():
        package = "llama-cpp-python"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
        quietly([*pip, "--dest", DATA, f"{package}=={VERSION}"])
    return path


def quietly(command: list[str | Path]) -> None:
    """Runs a command, of whose output nothing is seen unless it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PATH": path},
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-5000:]}")
