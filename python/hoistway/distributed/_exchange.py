"""One step's bytes from the ranks that read them to those that want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from hoistway.distributed._catalog import Catalog
from hoistway.distributed._link import Link
from hoistway.distributed._plan import Parcel, Rows, Step
from hoistway.distributed._wants import NOTHING, Wants

ALIGNMENT = 64
"""Of tensors in a bundle, so that they can be viewed as any type."""


class _Region(NamedTuple):
    """What one rank wants of a piece: where it lies in the piece, and where in the rank's part."""

    tensor: int
    cut: tuple[int, int, int] | None
    """Dimension, first and length, in bytes where it is the last; ``None`` for the whole piece."""
    row: int
    """First row in the rank's part, in bytes where rows are along the last dimension."""
    shape: tuple[int, ...]
    """In bytes."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape)


class _Arriving(NamedTuple):
    """Regions that arrive in one buffer, and where in it; no offsets if the buffer is their place already."""

    regions: Sequence[_Region]
    buffer: Any
    offsets: Sequence[int] | None


class Prepared(NamedTuple):
    """All that the messages of a step need: from here on, only the link can fail."""

    step: Step
    broadcasts: list[tuple[int, Any]]
    """The root's number in the node, and the bytes."""
    sends: list[tuple[int, int, Any]]
    receives: list[tuple[int, int, Any]]
    arriving: list[_Arriving]
    ready: dict[int, Any]
    outgoing: list[int]
    """Bytes of tensors in each message that goes out, without what lies between them."""


class Exchange:
    """What a rank holds between reading and handing out.

    Tensors are handled as bytes of the same dimensions, the last of which counts bytes: not every backend carries,
    and not every operation of torch takes, every type.
    """

    def __init__(
        self, catalog: Catalog, wants: Wants, rank: int, node: Sequence[int], link: Link | None
    ) -> None:
        self._catalog = catalog
        self._wants = wants
        self._rank = rank
        self._node = node
        self._me = node.index(rank)
        self._link = link
        self._growing: dict[int, Any] = {}
        self._missing: dict[int, int] = {}
        self.sent_bytes = 0
        self.received_bytes = 0

    def to_read(self, step: Step) -> tuple[list[str], dict[str, tuple[slice, ...]]]:
        """What this rank reads for a step: names, and the parts of those that are not read whole."""
        names, slices = [], {}
        for tensor in step.own:
            entry = self._catalog.entries[tensor]
            names.append(entry.name)
            part = self._wants.part(self._rank, tensor)
            if part is not None:
                slices[entry.name] = (*(slice(None),) * part.dim, slice(part.start, part.stop))
        for parcel in step.parcels:
            for piece in parcel.pieces if parcel.reader == self._me else ():
                entry = self._catalog.entries[piece.tensor]
                names.append(entry.name)
                if (piece.start, piece.stop) != (0, entry.rows):
                    slices[entry.name] = (*(slice(None),) * entry.row_dim, slice(piece.start, piece.stop))
        return names, slices

    def prepare(self, step: Step, read: Mapping[str, Any]) -> Prepared:
        """Packs what goes out and makes room for what comes in."""
        prepared = Prepared(step, [], [], [], [], {}, [])
        for tensor in step.own:
            prepared.ready[tensor] = read[self._catalog.entries[tensor].name]
        for number, parcel in enumerate(step.parcels):
            if parcel.reader == self._me:
                self._prepare_sending(number, parcel, read, prepared)
            else:
                self._prepare_receiving(number, parcel, prepared)
        return prepared

    def carry_out(self, prepared: Prepared) -> list[tuple[str, Any]]:
        """Exchanges the messages of a step; returns the tensors that this rank has now."""
        if self._link is not None:
            for_all = [self._link.start_broadcast(buffer, root) for root, buffer in prepared.broadcasts]
            for_one = self._link.start_exchange(prepared.sends, prepared.receives)
            while for_all:
                self._link.wait_for_all(for_all.pop(0), self._link.device)
            while for_one:
                self._link.wait(for_one.pop(0))
        self.sent_bytes += sum(prepared.outgoing)
        # Each bundle is let go once its tensors are copied out of it, so that they never take twice the memory.
        for messages in (prepared.broadcasts, prepared.sends, prepared.receives):
            messages.clear()
        while prepared.arriving:
            arriving = prepared.arriving.pop()
            self.received_bytes += sum(region.nbytes for region in arriving.regions)
            self._land(arriving, prepared.ready)
        done = []
        for tensor in prepared.step.done:
            if tensor not in prepared.ready:
                # A part that has no bytes, of a tensor that others share.
                prepared.ready[tensor] = self._typed(
                    tensor, self._empty(self._part_shape(self._rank, tensor))
                )
            done.append((self._catalog.entries[tensor].name, prepared.ready.pop(tensor)))
        return done

    def _prepare_sending(
        self, number: int, parcel: Parcel, read: Mapping[str, Any], prepared: Prepared
    ) -> None:
        pieces = [
            (piece, read[self._catalog.entries[piece.tensor].name], self._piece_shape(piece))
            for piece in parcel.pieces
        ]
        data = [_as_bytes(tensor, shape) for _, tensor, shape in pieces]
        if parcel.is_for_all:
            buffer = self._packed(data)
            prepared.outgoing.append(sum(bytes_.numel() for bytes_ in data))
            prepared.broadcasts.append((self._me, buffer))
        else:
            for place, rank in enumerate(self._node):
                regions = self._regions(rank, parcel) if rank != self._rank else []
                if regions:
                    whole = {piece.tensor: bytes_ for (piece, *_), bytes_ in zip(pieces, data, strict=True)}
                    buffer = self._packed([_cut(whole[region.tensor], region) for region in regions])
                    prepared.outgoing.append(sum(region.nbytes for region in regions))
                    prepared.sends.append((number, place, buffer))
        for (piece, tensor, shape), bytes_ in zip(pieces, data, strict=True):
            for region in self._regions(self._rank, parcel._replace(pieces=(piece,))):
                if region.shape == shape == self._part_shape(self._rank, piece.tensor):
                    prepared.ready[piece.tensor] = tensor
                else:
                    self._take(region, _cut(bytes_, region), prepared.ready)

    def _prepare_receiving(self, number: int, parcel: Parcel, prepared: Prepared) -> None:
        regions = self._regions(self._rank, parcel)
        if not regions:
            return
        if len(regions) == 1:
            arriving = _Arriving(regions, self._place(regions[0]).view(-1), None)
        else:
            offsets, total = _offsets([region.nbytes for region in regions])
            arriving = _Arriving(regions, self._empty((total,)), offsets)
        prepared.arriving.append(arriving)
        if parcel.is_for_all:
            prepared.broadcasts.append((parcel.reader, arriving.buffer))
        else:
            prepared.receives.append((number, parcel.reader, arriving.buffer))

    def _land(self, arriving: _Arriving, ready: dict[int, Any]) -> None:
        if arriving.offsets is None:
            self._note(arriving.regions[0], ready)
            return
        for region, offset in zip(arriving.regions, arriving.offsets, strict=True):
            bytes_ = arriving.buffer[offset : offset + region.nbytes].view(region.shape)
            if region.shape == self._part_shape(self._rank, region.tensor):
                # A copy: tensors that share a storage would be saved with all of it, and be taken for tied.
                ready[region.tensor] = self._typed(region.tensor, bytes_.clone())
            else:
                self._take(region, bytes_, ready)

    def _take(self, region: _Region, bytes_: Any, ready: dict[int, Any]) -> None:
        """Copies what this rank wants of something that is not to be kept."""
        self._place(region).copy_(bytes_)
        self._note(region, ready)

    def _place(self, region: _Region) -> Any:
        """Where a region belongs in this rank's part, all of which there is room for from then on."""
        part = self._growing.get(region.tensor)
        if part is None:
            part = self._growing[region.tensor] = self._empty(self._part_shape(self._rank, region.tensor))
            self._missing[region.tensor] = part.numel()
        row_dim = self._catalog.entries[region.tensor].row_dim
        return part.narrow(row_dim, region.row, region.shape[row_dim])

    def _note(self, region: _Region, ready: dict[int, Any]) -> None:
        """A region has its bytes, and maybe the tensor with it."""
        tensor = region.tensor
        self._missing[tensor] -= region.nbytes
        if not self._missing[tensor]:
            del self._missing[tensor]
            ready[tensor] = self._typed(tensor, self._growing.pop(tensor))

    def _typed(self, tensor: int, bytes_: Any) -> Any:
        entry = self._catalog.entries[tensor]
        torch_dtype = self._catalog.elements[entry.dtype].torch_dtype
        if not bytes_.numel():
            # The strides of a tensor without elements need not be whole elements of another type.
            *outer, last = bytes_.shape
            return bytes_.new_empty((*outer, last // torch_dtype.itemsize), dtype=torch_dtype)
        typed = bytes_.view(torch_dtype)
        return typed.view(()) if entry.is_scalar else typed

    def _empty(self, shape: tuple[int, ...]) -> Any:
        import torch  # noqa: PLC0415

        return torch.empty(shape, dtype=torch.uint8, device=self._link.device if self._link else "cpu")

    def _packed(self, pieces: Sequence[Any]) -> Any:
        """The bytes of pieces in one buffer: theirs, if there is one and its bytes lie together."""
        if len(pieces) == 1:
            return pieces[0].contiguous().view(-1)
        offsets, total = _offsets([piece.numel() for piece in pieces])
        buffer = self._empty((total,))
        for piece, offset in zip(pieces, offsets, strict=True):
            buffer[offset : offset + piece.numel()].view(piece.shape).copy_(piece)
        return buffer

    def _regions(self, rank: int, parcel: Parcel) -> list[_Region]:
        """What a rank wants of a parcel, in its order."""
        regions = (self._region(rank, piece) for piece in parcel.pieces)
        return [region for region in regions if region is not None and region.nbytes]

    def _region(self, rank: int, piece: Rows) -> _Region | None:
        if self._wants.code(rank, piece.tensor) == NOTHING:
            return None
        part = self._wants.part(rank, piece.tensor)
        if part is None and not piece.start:
            return _Region(piece.tensor, None, 0, self._piece_shape(piece))
        row_dim = self._catalog.entries[piece.tensor].row_dim
        shape = list(self._piece_shape(piece))
        start, stop, first = piece.start, piece.stop, 0
        cut: tuple[int, int, int] | None = None
        if part is not None and part.dim == row_dim:
            start, stop, first = max(start, part.start), min(stop, part.stop), part.start
            if stop <= start:
                return None
            cut = self._in_bytes(piece.tensor, row_dim, start - piece.start, stop - start)
        elif part is not None:
            cut = self._in_bytes(piece.tensor, part.dim, part.start, part.stop - part.start)
        if cut is not None:
            shape[cut[0]] = cut[2]
        row = self._catalog.bytes_along(piece.tensor, row_dim, start - first)
        return _Region(piece.tensor, cut, row, tuple(shape))

    def _in_bytes(self, tensor: int, dim: int, first: int, length: int) -> tuple[int, int, int]:
        along = self._catalog.bytes_along
        return dim, along(tensor, dim, first), along(tensor, dim, length)

    def _piece_shape(self, piece: Rows) -> tuple[int, ...]:
        entry = self._catalog.entries[piece.tensor]
        rows = piece.stop - piece.start
        if rows == entry.rows:
            return self._catalog.whole_shapes[piece.tensor]
        return self._catalog.bytes_shape(piece.tensor, entry.row_dim, rows)

    def _part_shape(self, rank: int, tensor: int) -> tuple[int, ...]:
        part = self._wants.part(rank, tensor)
        if part is None:
            return self._catalog.whole_shapes[tensor]
        return self._catalog.bytes_shape(tensor, part.dim, part.stop - part.start)


def _as_bytes(tensor: Any, shape: tuple[int, ...]) -> Any:
    import torch  # noqa: PLC0415

    return (tensor.view(1) if tensor.dim() == 0 else tensor).view(torch.uint8).view(shape)


def _cut(piece: Any, region: _Region) -> Any:
    return piece if region.cut is None else piece.narrow(*region.cut)


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where things of these sizes begin if they lie one after the other, and where the last ends."""
    offsets = []
    end = 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + size
    return offsets, end
