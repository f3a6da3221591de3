"""The builds and the model that several files of tests use."""

from __future__ import annotations

from pathlib import Path

import build
import models
import pytest
from build import Build


@pytest.fixture(scope="session")
def stock() -> Build:
    """llama.cpp as it is."""
    return build.build(patched=False)


@pytest.fixture(scope="session")
def patched() -> Build:
    """llama.cpp with the patch."""
    return build.build(patched=True)


@pytest.fixture(scope="session")
def small() -> Path:
    """A mixture of experts that loads in a moment."""
    return models.make(build.DATA / "models/small.gguf", models.SMALL)
