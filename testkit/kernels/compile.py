"""Compiles the device kernels, ``kernels.cu``, to the PTX for NVIDIA's devices that hoistway carries.

NVRTC does it, from the PyPI package ``nvidia-cuda-nvrtc-cu12``; neither a GPU nor the rest of the toolkit is
needed. The version is pinned because it decides the version of the PTX: drivers refuse PTX newer than they are,
and what NVRTC 12.0 writes is read by every driver of CUDA 12.0 or later.

Usage: ``compile.py [--check] [--nvrtc PATH]``
"""

import argparse
import ctypes
import difflib
import hashlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

NVRTC_VERSION = "12.0"
OPTIONS = ["--gpu-architecture=compute_60", "--std=c++17"]

FOLDER = Path(__file__).resolve().parents[2] / "crates/hoistway-device/src"
SOURCE = FOLDER / "driver" / "kernels.cu"
COMPILED = FOLDER / "cuda" / "kernels.ptx"


def main() -> int:
    """Writes ``kernels.ptx``, or with ``--check`` says whether it is what the source compiles to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if kernels.ptx is not what kernels.cu compiles to",
    )
    parser.add_argument(
        "--nvrtc",
        type=Path,
        metavar="PATH",
        help="libnvrtc.so.12 (default: that of the package nvidia.cuda_nvrtc)",
    )
    arguments = parser.parse_args()

    # Before NVRTC is looked for: a machine that lacks it still finds a forgotten recompilation.
    if arguments.check and not _carries_hash_of_source():
        print(f"{COMPILED} was not compiled from {SOURCE} as it is now: run {Path(__file__).name}.")
        return 1
    try:
        compiled = Nvrtc(arguments.nvrtc or _installed_nvrtc()).compile(SOURCE)
    except (NvrtcError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if not arguments.check:
        COMPILED.write_text(compiled)
        print(f"Wrote {COMPILED}.")
        return 0
    kept = COMPILED.read_text()
    if kept != compiled:
        differences = difflib.unified_diff(
            kept.splitlines(), compiled.splitlines(), "kept", "compiled", lineterm=""
        )
        print(f"{COMPILED} differs from what {SOURCE} compiles to:", *list(differences)[:40], sep="\n")
        return 1
    print(f"{COMPILED} is what {SOURCE} compiles to.")
    return 0


class NvrtcError(Exception):
    """NVRTC is absent, is of another version, or refused the source."""


class Nvrtc:
    """The few functions of NVRTC that turn a source into PTX."""

    def __init__(self, library: Path) -> None:
        # NVRTC opens its builtins by name alone and does not look beside itself, but a library that is already
        # loaded is found. Once loaded they stay so.
        for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"
        if self.version != NVRTC_VERSION:
            raise NvrtcError(
                f"{library} is NVRTC {self.version}, and kernels.ptx is compiled with {NVRTC_VERSION}: "
                "pip install nvidia-cuda-nvrtc-cu12==12.0.140."
            )

    def compile(self, source: Path) -> str:
        """The PTX of a source, below a line that tells where it comes from."""
        text = source.read_bytes()
        program = ctypes.c_void_p()
        name = source.name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
            try:
                self._call("nvrtcCompileProgram", program, len(OPTIONS), options)
            except NvrtcError as error:
                raise NvrtcError(f"{error}\n{self._text('ProgramLog', program)}") from None
            ptx = self._text("PTX", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))
        origin = _origin(self.version, text)
        return f"{origin}\n\n{_kernels_alone(ptx)}\n"

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.value.decode()

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise NvrtcError(f"{function}: {self._library.nvrtcGetErrorString(status).decode()}.")


def _installed_nvrtc() -> Path:
    try:
        package = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        package = None
    folders: Sequence[str] = (package and package.submodule_search_locations) or []
    for folder in folders:
        library = Path(folder) / "lib" / "libnvrtc.so.12"
        if library.exists():
            return library
    raise NvrtcError(
        "NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12==12.0.140, or name it with --nvrtc."
    )


def _origin(version: str, source: bytes) -> str:
    return (
        f"// Compiled by testkit/kernels/compile.py with NVRTC {version} from kernels.cu, "
        f"SHA-256 {hashlib.sha256(source).hexdigest()}"
    )


def _carries_hash_of_source() -> bool:
    if not COMPILED.exists():
        return False
    with COMPILED.open() as compiled:
        return compiled.readline().rstrip("\n") == _origin(NVRTC_VERSION, SOURCE.read_bytes())


def _kernels_alone(ptx: str) -> str:
    """PTX without blank lines, comments, which name the compiler's build, and constants that nothing uses.

    Those come from a header that NVRTC includes by itself; their names hold a hash that is none of ours.
    """
    code = re.sub(r"//[^\n]*", "", ptx)
    lines = [line.rstrip() for line in code.splitlines() if line.strip()]
    return "\n".join(line for line in lines if not re.match(r"\.global .*nv6target", line))


if __name__ == "__main__":
    sys.exit(main())
