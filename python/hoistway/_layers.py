"""Layers of models larger than memory, one after the other, while the next ones are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hoistway import _native
from hoistway._arguments import PathType, shown
from hoistway._checkpoint import Checkpoint
from hoistway._devices import find_libraries
from hoistway._frameworks import (
    Converter,
    Framework,
    check_framework,
    check_packages,
    converter,
    device_name,
    types_without_package,
)
from hoistway._options import ReaderOptions, StoreOptions
from hoistway._reader import opened, reader_options
from hoistway._words import counted
from hoistway.errors import ArgumentError, ClosedError, OptionError, TensorNotFoundError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

Order = Sequence[str] | Mapping[str, Sequence[str]]


def stream_layers(
    paths: PathType | Sequence[PathType] | Checkpoint,
    order: Order | None = None,
    *,
    budget: int | str = "4GiB",
    ahead: int = 1,
    timeout: float = 60.0,
    framework: Framework = "torch",
    device: Any = "cpu",
    stream: Any = None,
    lenient: bool | None = None,
    offset: int | None = None,
    store: StoreOptions | None = None,
    **options: Unpack[ReaderOptions],
) -> LayerStream:
    """Streams the layers of a model that does not fit in memory, in the order of use, pass after pass.

    Examples:
        >>> layers = hoistway.stream_layers("model.safetensors", budget="8GiB")  # doctest: +SKIP
        >>> for token in range(16):  # doctest: +SKIP
        ...     for layer in layers:  # One pass; the next one begins with the first layer again.
        ...         compute(layer["model.layers.0.mlp.up_proj.weight"])

    As many layers as the budget holds stay in memory. The others are read again in each pass, while earlier layers
    compute, to memory of layers that you have let go. Work that reads a layer in host memory must have ended before you
    drop its tensors and ask for the next layer, also where a device reads it, as in a copy with ``non_blocking=True``
    from memory that you pinned.

    Args:
        paths: What `hoistway.open` takes, or an open checkpoint.
        order: Names of layers in the order of use, such as ``model.layers.0``; or a mapping of your layer names to
            lists of tensor names, in that order. Default: the layers that tensor names number, in order. Load
            tensors outside layers, such as embeddings, with `hoistway.load_file`.
        budget: Limit on the bytes of all layers in memory, a number or text such as ``"8GiB"``: layers that stay,
            layers that are read ahead, and layers whose tensors you hold.
        ahead: Number of layers to read ahead of the current one.
        timeout: Seconds that the stream waits for layers that you hold.
        framework: Whose tensors to return: ``"torch"``, ``"numpy"``, ``"jax"``, ``"paddle"``, or ``"raw"``. They share
            memory with the stream: do not write to them.
        device: Where layers go: ``"cpu"``, ``"cuda:1"``, ``"rocm:0"``, a number, or a device of torch's. The
            budget then bounds memory of the device, which the stream uses again for later layers.
        stream: The stream of the device on which you use the layers: its handle, such as
            ``torch.cuda.Stream.cuda_stream``, or a stream of torch's; 0 is the legacy default stream. Then a layer is
            read while work on the stream still uses earlier ones. Without it, the memory of a layer is used again
            after all work of the device. Queue all work on a layer on that stream, and drop its tensors, before you
            ask for the next layer. A handle must stay valid until the stream of layers is closed. Not for jax, which
            computes on streams of its own.
        lenient: As in `hoistway.open`.
        offset: As in `hoistway.open`.
        store: As in `hoistway.open`.
        options: See `ReaderOptions`.
    """
    name = device_name(device, framework)
    check_framework(framework, name)
    handle = _handle(stream, framework, name)
    checkpoint = opened(paths, lenient, offset, store)
    layers = _layers(checkpoint, order)
    types = ((name, checkpoint.info(name)[0]) for _, names in layers for name in names)
    check_packages(types, types_without_package(framework))
    if name != "cpu":
        find_libraries()
    native = _native.LayerStream(checkpoint, layers, budget, ahead, timeout, name, **reader_options(options))
    # A stream of torch's is kept: its handle is of use as long as it lives.
    return LayerStream(native, [name for name, _ in layers], converter(framework, name), handle, stream)


class Layer(Mapping[str, Any]):
    """The tensors of a layer by name. Take tensors from it before you ask the stream for the next layer.

    Tensors that you took stay valid, and keep the whole layer in memory.
    """

    def __init__(self, name: str, tensors: Sequence[_native.Tensor], convert: Converter) -> None:
        self.name = name
        """The name of the layer."""
        self._tensors: dict[str, _native.Tensor] | None = {tensor.name: tensor for tensor in tensors}
        self._convert = convert

    def __getitem__(self, name: str) -> Any:
        tensor = self._held.get(name)
        if tensor is None:
            raise TensorNotFoundError(f"layer {self.name!r} has no tensor {name!r}", tensor=name)
        converted: dict[str, Any] = {}
        self._convert([tensor], converted)
        return converted.pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"Layer({self.name!r})"

    def _release(self) -> None:
        self._tensors = None

    @property
    def _held(self) -> dict[str, _native.Tensor]:
        if self._tensors is None:
            raise ClosedError(
                f"layer {self.name!r} was released when its stream went on: take its tensors before that"
            )
        return self._tensors


class LayerStream:
    """A stream of the layers of a model, which begins again after the last layer. `stream_layers` makes it.

    Iterating yields the remaining layers of the current pass.
    """

    def __init__(
        self,
        native: _native.LayerStream,
        names: Sequence[str],
        convert: Converter,
        stream: int | None = None,
        stream_owner: object = None,
    ) -> None:
        self._native: _native.LayerStream | None = native
        self._names = tuple(names)
        self._convert = convert
        self._stream = stream
        self._stream_owner = stream_owner
        self._next = 0
        self._current: Layer | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order of use."""
        return self._names

    def next_layer(self) -> Layer:
        """Returns the next layer, and releases the previous one. After the last layer comes the first.

        Raises:
            MemoryBudgetError: Tensors that you hold left no room until the timeout. The next call tries the same layer.
        """
        native = self._opened
        tensors: list[_native.Tensor] = []
        try:
            self._release_current()
            native.give_back(self._stream)
            name, tensors = native.next()
            self._next = (self._next + 1) % len(self._names)
            layer = self._current = Layer(name, tensors, self._convert)
        finally:
            # The traceback of an error that is kept holds the names here.
            del native, tensors
        if self._native is None:
            self._release_current()
            raise ClosedError("this stream was closed while a layer was waited for")
        return layer

    def __iter__(self) -> Iterator[Layer]:
        # No name here may hold a layer: the caller decides how long it lives.
        yield self.next_layer()
        while self._next != 0:
            yield self.next_layer()

    def stats(self) -> dict[str, Any]:
        """Statistics: layers ``kept`` in memory and ``served``, ``bytes_read``, ``peak_bytes``, ``peak_device_bytes``,
        ``stall_seconds``, and ``allocations`` of memory, which layers use in turn.
        """
        stats: dict[str, Any] = json.loads(self._opened.stats())
        return stats

    def close(self) -> None:
        """Ends the reads, and frees the memory of layers whose tensors you do not hold.

        A thread that waits for room gets `CancelledError`, one that waits for a read gets `ClosedError` after it.
        """
        native, self._native = self._native, None
        if native is not None:
            native.stop()
        self._release_current()
        # Memory of a device is freed after all work there.
        del native
        self._stream_owner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._native is None:
            return "LayerStream(closed)"
        return f"LayerStream({counted(len(self._names), 'layer')})"

    @property
    def _opened(self) -> _native.LayerStream:
        # Another thread may close it in between.
        native = self._native
        if native is None:
            raise ClosedError("this stream is closed")
        return native

    def _release_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current._release()


def _handle(stream: Any, framework: str, device: str) -> int | None:
    """The driver's handle of a stream of the device."""
    if stream is None:
        return None
    handle = getattr(stream, "cuda_stream", stream)
    is_handle = hasattr(handle, "__index__") and not isinstance(handle, bool)
    if not is_handle or not 0 <= int(handle) < 1 << 64:
        raise ArgumentError(f"stream cannot be {shown(stream)}: pass a stream of the device, or its handle")
    if device == "cpu":
        raise OptionError("stream cannot be given for layers in host memory: name a device, or leave it out")
    if framework == "jax":
        raise OptionError(
            "stream cannot be given for jax, which computes on streams of its own: leave it out"
        )
    ordinal = getattr(stream, "device_index", None)
    if ordinal is not None and ordinal != int(device.partition(":")[2] or 0):
        raise OptionError(f"stream cannot be one of device {ordinal}: layers go to {device}")
    return int(handle)


def _layers(checkpoint: _native.Checkpoint, order: Order | None) -> list[tuple[str, list[str]]]:
    if isinstance(order, Mapping):
        return [(name, list(tensors)) for name, tensors in order.items()]
    if isinstance(order, str) or not isinstance(order, Sequence | None):
        raise ArgumentError(
            f"order cannot be {shown(order)}: pass a list of layers, or their tensors by layer"
        )
    numbered = _native.numbered_layers(checkpoint)
    if order is None:
        if not numbered:
            raise OptionError(
                "the names of the tensors count no layers: say with order which tensors each has"
            )
        return numbered
    by_name = dict(numbered)
    for name in order:
        if name not in by_name:
            known = ", ".join(list(by_name)[:3])
            raise OptionError(
                f"order cannot have {name!r}: the layers are {known}{' …' * (len(by_name) > 3)}"
            )
    return [(name, by_name[name]) for name in order]
