"""maturin, behind a check of the compiler: an old cargo stops at the manifest, and does not say what is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import maturin
from maturin import (  # noqa: F401
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)


def build_wheel(*arguments: Any, **keywords: Any) -> str:
    """As maturin does."""
    check_compiler()
    return maturin.build_wheel(*arguments, **keywords)


def build_editable(*arguments: Any, **keywords: Any) -> str:
    """As maturin does."""
    check_compiler()
    return maturin.build_editable(*arguments, **keywords)


def prepare_metadata_for_build_wheel(*arguments: Any, **keywords: Any) -> str:
    """As maturin does."""
    check_compiler()
    return maturin.prepare_metadata_for_build_wheel(*arguments, **keywords)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def check_compiler() -> None:
    """Ends the build with a sentence if cargo is too old. Without one, maturin fetches it."""
    if shutil.which("cargo") is None:
        return
    said = subprocess.run(["cargo", "--version"], capture_output=True, text=True, check=False).stdout
    found = _version(r"cargo (\d+)\.(\d+)", said)
    manifest = (Path(__file__).parent.parent / "Cargo.toml").read_text()
    needed = _version(r'^rust-version = "(\d+)\.(\d+)', manifest)
    if found is not None and needed is not None and found < needed:
        raise SystemExit(
            f"hoistway needs Rust {needed[0]}.{needed[1]} or later, and cargo is of version {found[0]}.{found[1]}: "
            "install Rust from https://rustup.rs, or a wheel of hoistway, which needs no Rust"
        )


def _version(pattern: str, text: str) -> tuple[int, int] | None:
    found = re.search(pattern, text, re.MULTILINE)
    return None if found is None else (int(found[1]), int(found[2]))
