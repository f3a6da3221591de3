"""Layers that stream in, pass after pass."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import hoistway
import numpy as np
import pytest
from conftest import write_model
from hoistway.errors import (
    CancelledError,
    ClosedError,
    ForkedError,
    MemoryBudgetError,
    OptionError,
    StorageError,
    TensorNotFoundError,
)
from interrupting import threads_of, wait_until

LAYER = 64 << 10
"""Bytes of a layer's tensors."""
SLOT = LAYER + 8192
"""Bytes of memory of a layer at most: the blocks that it touches."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {"embed": ("F32", [8, 4])}
    for layer in range(4):
        tensors[f"model.layers.{layer}.up"] = ("U8", [LAYER // 2])
        tensors[f"model.layers.{layer}.down"] = ("BF16", [LAYER // 8, 2])
    return write_model(tmp_path / "model.safetensors", tensors)


def stream(model: Path, layers: float, **options) -> hoistway.LayerStream:
    return hoistway.stream_layers(model, budget=int(layers * SLOT), framework="numpy", **options)


def test_passes_deliver_every_layer_in_order(model: Path) -> None:
    expected = hoistway.load_file(model, framework="numpy")
    with stream(model, 2) as layers:
        assert layers.layers == tuple(f"model.layers.{number}" for number in range(4))
        for _ in range(3):
            names = []
            for layer in layers:
                names.append(layer.name)
                assert list(layer) == [f"{layer.name}.up", f"{layer.name}.down"]
                for name in layer:
                    assert layer[name].dtype == expected[name].dtype
                    assert layer[name].shape == expected[name].shape
                    assert layer[name].tobytes() == expected[name].tobytes()
            assert tuple(names) == layers.layers
        stats = layers.stats()
    assert stats["served"] == 12
    assert stats["peak_bytes"] <= 2 * SLOT
    # Memory of layers that were released is used again.
    assert stats["allocations"] == 2
    assert stats["kept"] < 4


def test_a_budget_for_all_reads_each_layer_once(model: Path) -> None:
    layers = stream(model, 5)
    for _ in range(3):
        assert len(list(layers)) == 4
    assert layers.stats()["bytes_read"] == 4 * LAYER


def test_a_tensor_that_is_held_stays_and_takes_room(model: Path) -> None:
    layers = stream(model, 1.5, timeout=0.2)
    first = layers.next_layer()
    held = first["model.layers.0.up"]
    before = held.tobytes()
    with pytest.raises(MemoryBudgetError, match="no room"):
        layers.next_layer()
    assert held.tobytes() == before
    del held
    # The layer that had no room is the next one.
    assert layers.next_layer().name == "model.layers.1"


def test_an_error_that_is_kept_keeps_no_closed_stream(model: Path) -> None:
    layers = stream(model, 1.5, timeout=0.2)
    native = layers._native
    references = sys.getrefcount(native)
    held = list(layers.next_layer().values())
    with pytest.raises(MemoryBudgetError, match="no room") as kept:
        layers.next_layer()
    layers.close()
    assert sys.getrefcount(native) == references - 1
    assert kept.value.__traceback__ is not None
    assert len(held) > 0


def test_a_layer_is_given_back_as_the_stream_goes_on(model: Path) -> None:
    layers = stream(model, 1.5)
    first = layers.next_layer()
    layers.next_layer()
    with pytest.raises(ValueError, match="was released"):
        first["model.layers.0.up"]


def test_tensors_outlive_the_stream(model: Path) -> None:
    expected = hoistway.load_file(model, framework="numpy")["model.layers.2.down"].tobytes()
    layers = stream(model, 2, order=["model.layers.2"])
    held = layers.next_layer()["model.layers.2.down"]
    layers.close()
    del layers
    gc.collect()
    assert held.tobytes() == expected
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 0


def test_statistics_do_not_wait_for_a_wait_and_closing_ends_it(model: Path) -> None:
    layers = stream(model, 1.5, timeout=3600)
    held = layers.next_layer()["model.layers.0.up"]
    ended: list[type[BaseException]] = []

    def wait() -> None:
        try:
            layers.next_layer()
        except CancelledError as error:
            ended.append(type(error))

    # That of the first layer may be listed for a moment more.
    wait_until(lambda: "hoistway-wait" not in threads_of(os.getpid()))
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: "hoistway-wait" in threads_of(os.getpid()))
    assert layers.stats()["served"] == 1
    layers.close()
    thread.join(60)
    assert ended == [CancelledError]
    assert held.nbytes == LAYER // 2


def test_a_stream_that_is_closed_during_a_read_hands_out_no_layer(model: Path) -> None:
    layers = stream(model, 2)
    native = layers._native

    class Closing:
        def __getattr__(self, name: str) -> object:
            return getattr(native, name)

        def next(self) -> object:
            found = native.next()
            layers.close()
            return found

    layers._native = Closing()
    with pytest.raises(ClosedError, match="while a layer was waited for"):
        layers.next_layer()
    assert layers._current is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_of_fork_closes_its_copy(model: Path) -> None:
    with stream(model, 2) as layers:
        layers.next_layer()
        child = os.fork()
        if child == 0:
            try:
                layers.close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert layers.next_layer().name == "model.layers.1"


def test_an_order_of_ones_own(model: Path) -> None:
    order = {"last": ["model.layers.3.up"], "first": ["model.layers.0.up", "embed"]}
    layers = stream(model, 3, order=order)
    assert [(layer.name, list(layer)) for layer in layers] == [
        ("last", ["model.layers.3.up"]),
        ("first", ["model.layers.0.up", "embed"]),
    ]
    backwards = [f"model.layers.{number}" for number in (3, 1)]
    assert [layer.name for layer in stream(model, 2, order=backwards)] == backwards


def test_what_cannot_be_streamed_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"does not hold layer 'model\.layers\.\d"):
        stream(model, 0.5)
    with pytest.raises(OptionError, match="'no\\.such'"):
        stream(model, 2, order=["no.such"])
    with pytest.raises(TensorNotFoundError):
        stream(model, 2, order={"a": ["nothing"]})
    with pytest.raises(TensorNotFoundError, match="nothing"):
        stream(model, 2).next_layer()["nothing"]
    flat = write_model(tmp_path / "flat.safetensors", {"a": ("U8", [4])})
    with pytest.raises(OptionError, match="count no layers"):
        hoistway.stream_layers(flat, framework="numpy")


def test_a_file_that_shrinks_is_an_error(model: Path) -> None:
    layers = stream(model, 1.2)
    layers.next_layer()
    with open(model, "r+b") as file:
        file.truncate(LAYER)
    with pytest.raises(
        (hoistway.errors.FormatError, hoistway.errors.FileChangedError, StorageError)
    ) as caught:
        list(layers)
    assert "layer 'model.layers." in str(caught.value)
    assert Path(caught.value.path) == model


def test_ctrl_c_ends_a_wait_and_leaves_no_error_behind(model: Path) -> None:
    script = """
        import glob, signal, sys, time, hoistway
        from hoistway.errors import MemoryBudgetError
        signal.signal(signal.SIGINT, signal.default_int_handler)
        layers = hoistway.stream_layers(sys.argv[1], budget=int(sys.argv[2]), framework="numpy", timeout=1)
        def is_waiting():
            for name in glob.glob("/proc/self/task/*/comm"):
                try:
                    with open(name) as file:
                        if file.read().strip() == "hoistway-wait":
                            return True
                except OSError:
                    pass
            return False
        held = layers.next_layer()["model.layers.0.up"]
        # The thread that waited for it may not have ended yet, and must not be taken for one of the loop.
        while is_waiting():
            time.sleep(0.01)
        print("started", flush=True)
        try:
            while True:
                try:
                    layers.next_layer()
                except MemoryBudgetError:
                    pass
        except KeyboardInterrupt:
            print("interrupted")
        # The wait goes on without a caller, and ends with an error that no one asks for.
        while is_waiting():
            time.sleep(0.01)
        del held
        print(layers.next_layer().name)
        """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), model, str(int(1.5 * SLOT))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "started\n"
    wait_until(lambda: "hoistway-wait" in threads_of(child.pid))
    os.kill(child.pid, signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert output.split() == ["interrupted", "model.layers.1"]


def test_a_torch_tensor_shows_the_stream(model: Path) -> None:
    torch = pytest.importorskip("torch")
    layers = hoistway.stream_layers(model, budget=3 * SLOT)
    tensor = layers.next_layer()["model.layers.0.down"]
    assert tensor.dtype == torch.bfloat16
    expected = hoistway.load_file(model)["model.layers.0.down"]
    assert np.array_equal(tensor.view(torch.uint8).numpy(), expected.view(torch.uint8).numpy())


def test_a_child_of_fork_is_told(model: Path) -> None:
    layers = stream(model, 2)
    layers.next_layer()
    child = os.fork()
    if child == 0:
        try:
            layers.next_layer()
        except ForkedError:
            os._exit(7)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert layers.next_layer().name == "model.layers.1"
