"""Loading from a stand-in of 3FS by USRBIO, past the kernel."""

from __future__ import annotations

from pathlib import Path

import hoistway
import numpy as np
import pytest
import safetensors.numpy
from conftest import Daemon
from hoistway.errors import OptionError, RouteUnavailableError, StorageError


@pytest.fixture
def tensors(daemon: Daemon) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    tensors = {f"layer.{i}": generator.random((512, 1024), np.float32) for i in range(6)}
    safetensors.numpy.save_file(tensors, daemon.root / "model.safetensors")
    return tensors


@pytest.mark.parametrize("route", ["usrbio", "auto"])
@pytest.mark.parametrize("client", ["native", None])
def test_a_file_on_a_3fs_arrives_by_usrbio(daemon: Daemon, tensors, route, client) -> None:
    path = daemon.mount / "model.safetensors"
    loaded = hoistway.load_file(path, framework="numpy", route=route, usrbio=client)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)
    assert {carrier.route for carrier in loaded.report.carriers} == {"usrbio"}
    assert any("native client" in note for note in loaded.report.notes)


def test_a_file_elsewhere_cannot_take_the_route(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(3)}, path)
    with pytest.raises(RouteUnavailableError, match="not on a 3FS") as caught:
        hoistway.load_file(path, framework="numpy", route="usrbio")
    assert caught.value.path == path
    with pytest.raises(OptionError, match="usrbio cannot be 'mine': it must be one of auto, native, vendor"):
        hoistway.load_file(path, framework="numpy", usrbio="mine")


def test_an_error_of_the_storage_has_its_number_and_its_place(daemon: Daemon, tensors) -> None:
    path = daemon.mount / "model.safetensors"
    # The first read is the probe.
    daemon.behave("error_every=3")
    with pytest.raises(StorageError, match="a storage server failed") as caught:
        hoistway.load_file(path, framework="numpy", route="usrbio", usrbio="native", chunk="64KiB")
    assert caught.value.errno == 121
    assert caught.value.path == path
    assert caught.value.tensor in tensors
    assert caught.value.offset is not None
