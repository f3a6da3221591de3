"""Compiles the device kernels, ``kernels.cu``, to the images for NVIDIA's devices: machine code, and PTX.

NVRTC compiles them to PTX, and ptxas compiles that PTX to machine code for each architecture, as the driver would. Both
are PyPI packages; neither a GPU nor the rest of the toolkit is needed. The version of NVRTC decides that of the PTX:
drivers refuse PTX newer than they are, and what NVRTC 12.0 writes is read by every driver of CUDA 12.0 or later. ptxas
12.9 is the last that knows both 7.0 and 12.0; drivers of CUDA 12.0 and later load machine code of any 12.

Usage: ``compile_nvidia.py [--check]``
"""

import ctypes
import re
import sys
import tempfile
from pathlib import Path

from images import DEVICE, SOURCE, CompilerError, Images, installed, run

NVRTC, NVRTC_VERSION = "nvidia-cuda-nvrtc-cu12==12.0.140", "12.0"
PTXAS, PTXAS_VERSION = "nvidia-cuda-nvcc-cu12==12.9.86", "12.9"
PTX = "compute_60"
OPTIONS = [f"--gpu-architecture={PTX}", "--std=c++17"]
IMAGES = Images(
    DEVICE / "cuda" / "kernels", "compile_nvidia.py", f"NVRTC {NVRTC_VERSION} and ptxas {PTXAS_VERSION}"
)


def compiled() -> dict[str, bytes]:
    """The PTX, and the machine code of each architecture."""
    nvrtc = Nvrtc(installed("nvidia.cuda_nvrtc", "lib/libnvrtc.so.12", NVRTC))
    ptxas = installed("nvidia.cuda_nvcc", "bin/ptxas", PTXAS)
    if f"release {PTXAS_VERSION}," not in run([str(ptxas), "--version"], ptxas.parent):
        raise CompilerError(f"{ptxas} is of another version: pip install {PTXAS}.")
    ptx = nvrtc.compile(SOURCE)
    images = {f"{PTX}.ptx": ptx.encode()}
    for architecture in IMAGES.architectures(r"sm_\d+"):
        images[f"{architecture}.cubin"] = machine_code(ptxas, ptx, architecture)
    return images


def machine_code(ptxas: Path, ptx: str, architecture: str) -> bytes:
    """What the PTX compiles to for an architecture."""
    with tempfile.TemporaryDirectory() as folder:
        # By names alone, so that no path of this machine gets into the result.
        Path(folder, "kernels.ptx").write_text(ptx)
        command = [str(ptxas), "-O3", f"-arch={architecture}", "kernels.ptx", "-o", "kernels.cubin"]
        run(command, Path(folder))
        return Path(folder, "kernels.cubin").read_bytes()


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
        if f"{major.value}.{minor.value}" != NVRTC_VERSION:
            raise CompilerError(f"{library} is of another version: pip install {NVRTC}.")

    def compile(self, source: Path) -> str:
        """The PTX of a source."""
        program = ctypes.c_void_p()
        name = source.name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), name, 0, None, None)
        try:
            options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
            try:
                self._call("nvrtcCompileProgram", program, len(OPTIONS), options)
            except CompilerError as error:
                raise CompilerError(f"{error}\n{self._text('ProgramLog', program)}") from None
            return kernels_alone(self._text("PTX", program)) + "\n"
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.value.decode()

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise CompilerError(f"{function}: {self._library.nvrtcGetErrorString(status).decode()}.")


def kernels_alone(ptx: str) -> str:
    """PTX without blank lines, comments, which name the compiler's build, and constants that nothing uses.

    Those come from a header that NVRTC includes by itself; their names hold a hash that is none of ours.
    """
    code = re.sub(r"//[^\n]*", "", ptx)
    lines = [line.rstrip() for line in code.splitlines() if line.strip()]
    return "\n".join(line for line in lines if not re.match(r"\.global .*nv6target", line))


if __name__ == "__main__":
    sys.exit(IMAGES.main(__doc__ or "", compiled))
