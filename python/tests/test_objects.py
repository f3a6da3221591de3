"""Checkpoints in an object store: a server of the tests that fails on demand stands for it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import windlass
from conftest import STAND_IN, write_model
from windlass import errors

OBJECTD = STAND_IN.with_name("objectd")
TENSORS = {"a": ("F32", [1000, 1003]), "b": ("U8", [5]), "c": ("F16", [2000, 2001])}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[windlass.StoreOptions]:
    """A store with a model in a folder, and a damaged file."""
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    write_model(folder / "model.safetensors", TENSORS)
    (tmp_path / "models" / "bad.safetensors").write_bytes(b"not a model" * 9)
    with subprocess.Popen(
        [OBJECTD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield {
            "endpoint": server.stdout.readline().strip(),
            "access_key_id": "key",
            "secret_access_key": "canary",
        }
        server.stdin.close()


def test_objects_are_loaded_opened_and_streamed(store: windlass.StoreOptions, tmp_path: Path) -> None:
    expected = windlass.load_file(tmp_path / "models" / "llama", framework="numpy")
    loaded = windlass.load_file("s3://models/llama/", framework="numpy", store=store)
    streamed = windlass.iter_tensors("s3://models/llama/", framework="numpy", store=store)
    with windlass.open("s3://models/llama/model.safetensors", framework="numpy", store=store) as checkpoint:
        part = checkpoint.get_slice("a")[7:9]
        assert checkpoint.files() == ["s3://models/llama/model.safetensors"]
    assert np.array_equal(part.view(np.uint8), expected["a"][7:9].view(np.uint8))
    for tensors in (loaded, dict(streamed)):
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.tobytes() == expected[name].tobytes()
    assert [carrier.route for carrier in loaded.report.carriers] == ["http"]
    assert "canary" not in str(loaded.report)


def test_the_environment_names_the_store(
    store: windlass.StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", store["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    assert windlass.load_file("s3://models/llama/", framework="raw").keys() == TENSORS.keys()


def test_errors_are_those_of_files_and_hold_no_secret(store: windlass.StoreOptions) -> None:
    url = f"{store['endpoint']}/models/none.safetensors?X-Amz-Signature=canary"
    with pytest.raises(FileNotFoundError, match="no such object") as missing:
        windlass.load_file(url, framework="raw")
    with pytest.raises(errors.FormatError) as bad:
        windlass.load_file("s3://models/bad.safetensors", framework="raw", store=store)
    with pytest.raises(errors.OptionError, match="store cannot be 'colour'") as option:
        windlass.load_file("s3://models/llama/", framework="raw", store={"colour": "canary"})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(errors.RouteUnavailableError) as route:
        windlass.load_file("s3://models/llama/", framework="raw", store=store, route="cached")
    for error in (missing, bad, option, route):
        assert "canary" not in str(error.value) + repr(error.value)
    with pytest.raises(errors.OptionError, match="pass the URL as text"):
        windlass.load_file(Path("s3://models/llama"), framework="raw", store=store)
    assert bad.value.path == "s3://models/bad.safetensors"  # type: ignore[attr-defined]
