"""Compiles the device kernels, ``kernels.cu``, to the code objects for AMD's devices that hoistway carries.

The Clang and the linker of the PyPI package ``ziglang`` do it: they have a back end for these devices, and neither ROCm
nor a GPU is needed. The version is pinned, so that everyone gets the same bytes; ``origin.txt`` beside the code objects
says what they were made of.

Usage: ``compile_amd.py [--check] [--zig PATH]``
"""

import argparse
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "0.15.2"

SOURCE = Path(__file__).resolve().parents[2] / "crates/hoistway-device/src/driver/kernels.cu"
FOLDER = SOURCE.parents[1] / "hip" / "kernels"
ORIGIN = FOLDER / "origin.txt"
LIST = FOLDER.with_suffix(".rs")

OPTIONS = [
    *("-x", "c++", "-std=c++17", "-O3", "-c"),
    *("--target=amdgcn-amd-amdhsa", "-nogpulib", "-nostdinc", "-ffreestanding"),
    # ROCm reads version 5 since 5.5.
    *("-mcode-object-version=5", "-fvisibility=protected", "-fno-exceptions", "-fno-rtti"),
]


def main() -> int:
    """Writes the code objects, or with ``--check`` says whether they are what the source compiles to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the code objects are others"
    )
    parser.add_argument("--zig", type=Path, metavar="PATH", help="default: that of the package ziglang")
    arguments = parser.parse_args()

    # Before the compiler is looked for: a machine that lacks it still finds a forgotten recompilation.
    if arguments.check and not is_of_source():
        print(f"{FOLDER} was not compiled from {SOURCE} as it is now: run {Path(__file__).name}.")
        return 1
    try:
        zig = arguments.zig or installed_zig()
        compiled = {architecture: code_object(zig, architecture) for architecture in architectures()}
    except CompilerError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.check:
        changed = [name for name, image in compiled.items() if path_of(name).read_bytes() != image]
        print(f"{', '.join(changed) or 'none'} of {len(compiled)} differ from what {SOURCE} compiles to.")
        return 1 if changed else 0
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.co"):
        old.unlink()
    for name, image in compiled.items():
        path_of(name).write_bytes(image)
    ORIGIN.write_text(origin())
    print(f"Wrote {len(compiled)} code objects of {sum(map(len, compiled.values()))} bytes to {FOLDER}.")
    return 0


class CompilerError(Exception):
    """The compiler is absent, is of another version, or refused the source."""


def architectures() -> list[str]:
    """Those that the engine has code objects for: the list is in its source."""
    return re.findall(r'"(gfx[0-9a-f]+)"', LIST.read_text().partition("images![")[2].partition("]")[0])


def path_of(architecture: str) -> Path:
    """Where its code object is kept."""
    return FOLDER / f"{architecture}.co"


def code_object(zig: Path, architecture: str) -> bytes:
    """The linked code object for an architecture, without what only debuggers read."""
    with tempfile.TemporaryDirectory() as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.co")
        # In its folder, so that no path of this machine gets into the result.
        run(
            [str(zig), "clang", *OPTIONS, f"-mcpu={architecture}", SOURCE.name, "-o", str(compiled)],
            SOURCE.parent,
        )
        link = [str(zig), "ld.lld", "-shared", "--strip-debug", "--build-id=none", "--no-undefined"]
        run([*link, str(compiled), "-o", str(linked)], Path(folder))
        return linked.read_bytes()


def run(command: list[str], folder: Path) -> None:
    """Runs a step of the compiler."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompilerError(f"{' '.join(command)}\n{done.stderr}")


def installed_zig() -> Path:
    """The program of the package, if it is of the right version."""
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec and spec.submodule_search_locations) or []:
        zig = Path(folder, "zig")
        version = subprocess.run([zig, "version"], capture_output=True, text=True, check=True).stdout.strip()
        if version != VERSION:
            raise CompilerError(f"{zig} is of version {version}: pip install ziglang=={VERSION}.")
        return zig
    raise CompilerError(
        f"the compiler is not installed: pip install ziglang=={VERSION}, or name it with --zig."
    )


def origin() -> str:
    """What the code objects are made of, for people and for ``--check``."""
    lines = [f"Compiled by testkit/kernels/compile_amd.py with ziglang {VERSION} of these files, by SHA-256:"]
    lines.append(f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()}  {SOURCE.name}")
    lines.append("The results:")
    for name in architectures():
        lines.append(f"{hashlib.sha256(path_of(name).read_bytes()).hexdigest()}  {path_of(name).name}")
    return "\n".join(lines) + "\n"


def is_of_source() -> bool:
    """Whether the code objects that are kept are all there, unchanged, and made of the source as it is."""
    try:
        return ORIGIN.read_text() == origin()
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
