"""Compiles the device kernels, ``kernels.cu``, to the code objects for AMD's devices that hoistway carries.

The Clang and the linker of the PyPI package ``ziglang`` do it: they have a back end for these devices, and neither ROCm
nor a GPU is needed. The version is pinned, so that everyone gets the same bytes.

Usage: ``compile_amd.py [--check]``
"""

import sys
import tempfile
from pathlib import Path

from images import DEVICE, SOURCE, CompilerError, Images, installed, run

VERSION = "0.15.2"
IMAGES = Images(DEVICE / "hip" / "kernels", "compile_amd.py", f"ziglang {VERSION}")

OPTIONS = [
    *("-x", "c++", "-std=c++17", "-O3", "-c"),
    *("--target=amdgcn-amd-amdhsa", "-nogpulib", "-nostdinc", "-ffreestanding"),
    # ROCm reads version 5 since 5.5.
    *("-mcode-object-version=5", "-fvisibility=protected", "-fno-exceptions", "-fno-rtti"),
]


def compiled() -> dict[str, bytes]:
    """The code object of each architecture."""
    zig = installed("ziglang", "zig", f"ziglang=={VERSION}")
    version = run([str(zig), "version"], zig.parent).strip()
    if version != VERSION:
        raise CompilerError(f"{zig} is of version {version}: pip install ziglang=={VERSION}.")
    return {f"{name}.co": code_object(zig, name) for name in IMAGES.architectures(r"gfx[0-9a-f]+")}


def code_object(zig: Path, architecture: str) -> bytes:
    """The linked code object for an architecture, without what only debuggers read."""
    with tempfile.TemporaryDirectory() as folder:
        unlinked, linked = Path(folder, "kernels.o"), Path(folder, "kernels.co")
        # In its folder, so that no path of this machine gets into the result.
        run(
            [str(zig), "clang", *OPTIONS, f"-mcpu={architecture}", SOURCE.name, "-o", str(unlinked)],
            SOURCE.parent,
        )
        link = [str(zig), "ld.lld", "-shared", "--strip-debug", "--build-id=none", "--no-undefined"]
        run([*link, str(unlinked), "-o", str(linked)], Path(folder))
        return linked.read_bytes()


if __name__ == "__main__":
    sys.exit(IMAGES.main(__doc__ or "", compiled))
