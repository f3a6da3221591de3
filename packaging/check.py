"""Checks what ``build.sh`` built: metadata, contents, needed glibc, sizes. Installs and runs what runs here."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import platform
import re
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

GLIBC = (2, 28)
"""The newest glibc that may be needed: that of manylinux_2_28."""

MOST_WHEEL_BYTES = 10_000_000

TOOLS = Path(sys.executable).parent


def main() -> None:
    """Checks the directory that is named."""
    directory = Path(sys.argv[1])
    wheels = sorted(directory.glob("*.whl"))
    tarballs = sorted(directory.glob("*-linux.tar.gz"))
    [sdist] = set(directory.glob("*.tar.gz")) - set(tarballs)
    check(wheels, "there are no wheels")
    check_sums(directory)
    run([TOOLS / "twine", "check", "--strict", *wheels, sdist])
    run([TOOLS / "check-wheel-contents", *wheels])
    for wheel in wheels:
        check_wheel(wheel)
    check_sdist(sdist)
    for tarball in tarballs:
        check_tarball(tarball)
    for package in sorted(directory.glob("*.deb")):
        check_debian(package)
    with tempfile.TemporaryDirectory() as place:
        model = write_model(Path(place) / "model.safetensors")
        for path in [*wheels, *tarballs]:
            if platform.machine() in path.name:
                use(path, Path(place), model)
            else:
                print(f"{path.name}: not run, as this machine is {platform.system()} on {platform.machine()}")
    for path in sorted(directory.iterdir()):
        if path.is_file():
            print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")


def check(condition: object, problem: str) -> None:
    """Ends with a message unless a condition holds."""
    if not condition:
        raise SystemExit(problem)


def run(command: Sequence[object], **options: Any) -> str:
    """Runs a program to its end, which must be good, and returns what it printed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    check(done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_sums(directory: Path) -> None:
    """Each artifact has its checksum."""
    listed = dict(line.split()[::-1] for line in (directory / "SHA256SUMS").read_text().splitlines())
    files = {path.name: path for path in directory.iterdir() if path.is_file() and path.name != "SHA256SUMS"}
    check(set(listed) == set(files), f"SHA256SUMS lists {sorted(listed)}, not {sorted(files)}")
    for name, path in files.items():
        check(hashlib.sha256(path.read_bytes()).hexdigest() == listed[name], f"{name} has another checksum")


def check_wheel(wheel: Path) -> None:
    """A wheel has its license, its command and its bill of materials, is small, and runs where its tag says."""
    is_windows = wheel.stem.endswith("-cp310-abi3-win_amd64")
    if not is_windows:
        shown = run([TOOLS / "auditwheel", "show", wheel])
        tag = re.search(r'platform tag:\s*"manylinux_(\d+)_(\d+)_', shown)
        check(tag and tuple(map(int, tag.groups())) <= GLIBC, f"auditwheel says of {wheel.name}:\n{shown}")
        check(f"manylinux_{GLIBC[0]}_{GLIBC[1]}_" in wheel.name, f"{wheel.name} has another tag")
    check(wheel.stat().st_size <= MOST_WHEEL_BYTES, f"{wheel.name} has more than {MOST_WHEEL_BYTES} bytes")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        parts = (
            "licenses/LICENSE",
            "licenses/NOTICES",
            "entry_points.txt",
            ".cyclonedx.json",
            "hoistway/py.typed",
        )
        for end in parts:
            check(any(name.endswith(end) for name in names), f"{wheel.name} lacks {end}: {names}")
        [notices] = (name for name in names if name.endswith("licenses/NOTICES"))
        check_notices(wheel.name, archive.read(notices).decode())
        [metadata] = (name for name in names if name.endswith(".dist-info/METADATA"))
        listed = re.findall(r"^License-File: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
        check(listed == ["LICENSE", "NOTICES"], f"the metadata of {wheel.name} list the licenses {listed}")
        outside = [name for name in names if not name.startswith(("hoistway/", "hoistway-"))]
        check(not outside, f"{wheel.name} has files outside the package: {outside}")
        for name in names:
            if name.endswith(".so"):
                check_binary(f"{wheel.name}: {name}", archive.read(name))
        if is_windows:
            check_windows_module(wheel.name, archive.read("hoistway/_native.pyd"))
    materials = json.loads(wheel.with_suffix(".cdx.json").read_text())
    check(len(materials["components"]) > 100, f"the bill of materials of {wheel.name} lists too little")


def check_sdist(sdist: Path) -> None:
    """An sdist has all that cargo needs to know of its crates."""
    with tempfile.TemporaryDirectory() as place, tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
        [root] = Path(place).iterdir()
        check((root / "LICENSE").exists(), f"{sdist.name} lacks LICENSE")
        run(
            ["cargo", "metadata", "--format-version=1", "--manifest-path=python/Cargo.toml"],
            cwd=root,
        )


def check_tarball(tarball: Path) -> None:
    """A tarball has its license, and its programs and libraries are stripped and run on old distributions."""
    with tarfile.open(tarball) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        for end in ("/LICENSE", "/NOTICES"):
            check(any(member.name.endswith(end) for member in files), f"{tarball.name} lacks {end}")
        for member in files:
            data = archive.extractfile(member).read()
            if data.startswith(b"\x7fELF"):
                check_binary(f"{tarball.name}: {member.name}", data)


def check_debian(package: Path) -> None:
    """A package for Debian names the crates that it is linked with, and their licenses."""
    name = package.name.partition("_")[0]
    with tarfile.open(
        fileobj=io.BytesIO(subprocess.check_output(["dpkg-deb", "--fsys-tarfile", package]))
    ) as files:
        check_notices(package.name, files.extractfile(f"./usr/share/doc/{name}/copyright").read().decode())


def check_notices(name: str, shown: str) -> None:
    """What an artifact says of others' code has the crates that it is linked with, and their licenses."""
    for crate in ("libc", "serde_json"):
        check(re.search(rf"^Files: .*\b{crate}-\d", shown, re.MULTILINE), f"{name} says nothing of {crate}")
    if "win" not in name:
        for part in ("zig/compiler_rt", "llvm/libunwind"):
            check(re.search(rf"^Files: {part}", shown, re.MULTILINE), f"{name} says nothing of {part}")
    check("Permission is hereby granted" in shown, f"{name} lacks the text of the MIT License")


def check_binary(name: str, data: bytes) -> None:
    """A program or a shared library needs no newer glibc, and has no symbols for debuggers."""
    elf = ELFFile(io.BytesIO(data))
    check(not elf.get_section_by_name(".symtab"), f"{name} is not stripped")
    needed = {version for version in glibc_versions(elf) if version > GLIBC}
    check(not needed, f"{name} needs glibc {needed}")


def check_windows_module(wheel: str, data: bytes) -> None:
    """An extension module of any Python 3 links that one library of Python's which all of them have."""
    check(
        data.startswith(b"MZ") and b"PyInit__native" in data, f"{wheel}: _native.pyd is no module of Windows"
    )
    libraries = {name.lower() for name in re.findall(rb"(?i)python3\d*\.dll", data)}
    check(libraries == {b"python3.dll"}, f"{wheel}: _native.pyd needs {libraries}")


def glibc_versions(elf: ELFFile) -> Iterator[tuple[int, ...]]:
    """The versions of glibc that a file needs symbols of."""
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    if found := re.fullmatch(r"GLIBC_([\d.]+)", version.name):
                        yield tuple(map(int, found[1].split(".")))


def write_model(path: Path) -> Path:
    """Writes a small checkpoint."""
    data = bytes(range(256)) * 64
    header = json.dumps({"a": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def use(path: Path, place: Path, model: Path) -> None:
    """Installs an artifact into a place of its own, and uses it. Neither Rust nor a compiler is in the path."""
    target = place / path.name
    if path.suffix == ".whl":
        run([sys.executable, "-m", "venv", target])
        run([target / "bin/pip", "install", "--no-index", "--quiet", path])
        use_command([target / "bin/hoistway"], model)
        use_command([target / "bin/python", "-m", "hoistway"], model)
        script = (
            "import sys, hoistway; tensors = hoistway.load_file(sys.argv[1], framework='raw');"
            "assert tensors['a'].tobytes() == bytes(range(256)) * 64; print(tensors.report)"
        )
        run([target / "bin/python", "-c", script, model], cwd=place, env=environment())
        return
    with tarfile.open(path) as archive:
        archive.extractall(target, filter="data")
    [root] = target.iterdir()
    if path.name.startswith("lib"):
        library = ctypes.CDLL(str(root / "lib/libhoistway.so"))
        library.hoistway_version.restype = ctypes.c_char_p
        check(library.hoistway_version().decode() in path.name, f"{path.name} has another version")
    else:
        use_command([root / "hoistway"], model)


def use_command(command: Sequence[object], model: Path) -> None:
    """Uses an installed command, and measures how long it takes to start."""

    def hoistway(*arguments: object) -> str:
        return run([*command, *arguments], cwd=model.parent, env=environment())

    check(hoistway("--version").startswith("hoistway "), f"{command} does not tell its version")
    check(len(json.loads(hoistway("inspect", "--json", model))["tensors"]) == 1, f"{command} finds no tensor")
    check("1 tensor" in hoistway("load", "--verify", model), f"{command} does not load")
    times = []
    for _ in range(21):
        start = time.perf_counter()
        hoistway("--version")
        times.append(time.perf_counter() - start)
    print(
        f"{statistics.median(times) * 1000:8.1f} ms  to start {Path(command[0]).name} {' '.join(command[1:])}"
    )


def environment() -> dict[str, str]:
    """That of a user without tools."""
    return {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"]}


if __name__ == "__main__":
    main()
