"""The memory of requests: what is taken, what is refused, and how long it is kept."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import hoistway
import numpy as np
import pytest
import torch
from conftest import random_bytes, write_model
from hoistway import kv

SIZE = 6000


def load(blocks: kv.Namespace, key: kv.Key, size: int = SIZE) -> bytes:
    found = bytearray(size)
    assert blocks.load([key], [found]).wait(30).ok
    return bytes(found)


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: np.frombuffer(data, np.float32).reshape(-1, 10, 3),
        lambda data: torch.frombuffer(bytearray(data), dtype=torch.int16).view(30, 100),
        lambda data: torch.frombuffer(bytearray(data), dtype=torch.bfloat16)[None],
        lambda data: [data[:1], data[1:4097], data[4097:]],
        lambda data: (memoryview(data)[:3000], torch.frombuffer(bytearray(data[3000:]), dtype=torch.uint8)),
    ],
)
def test_everything_with_bytes_can_be_stored(blocks: kv.Namespace, make) -> None:
    data = bytes(random_bytes(SIZE))
    assert blocks.store(["a"], [make(data)]).wait(30).ok
    assert load(blocks, "a") == data


def test_everything_with_bytes_can_be_loaded_into(blocks: kv.Namespace) -> None:
    data = bytes(random_bytes(SIZE))
    blocks.store(["a"], [data]).wait(30)
    anonymous = mmap.mmap(-1, SIZE)
    targets = [
        bytearray(SIZE),
        memoryview(bytearray(SIZE)),
        np.zeros(SIZE // 4, np.float32),
        np.zeros((2, SIZE // 2), np.uint8),
        torch.zeros(SIZE // 2, dtype=torch.bfloat16),
        torch.zeros((3, SIZE // 3), dtype=torch.uint8),
        anonymous,
    ]
    assert blocks.load(["a"] * len(targets), targets).wait(30).ok
    for target in targets:
        found = target.flatten().view(torch.uint8).numpy() if isinstance(target, torch.Tensor) else target
        assert bytes(found) == data
    anonymous.close()


def test_memory_that_is_gone_is_neither_stored_nor_loaded_into(blocks: kv.Namespace) -> None:
    tensor = torch.zeros(SIZE, dtype=torch.uint8)[SIZE // 2 :]
    tensor.untyped_storage().resize_(SIZE - 1)
    array = np.zeros(SIZE, np.uint8)
    view = array[1:]
    array.resize(100, refcheck=False)
    for gone in (tensor, view):
        with pytest.raises(BufferError, match=r"buffer 1: .* resized"):
            blocks.store(["a", "b"], [bytes(10), gone])
        with pytest.raises(BufferError, match=r"buffer 1: .* resized"):
            blocks.load(["a", "b"], [bytearray(10), gone])


def test_pages_are_gathered_and_scattered(blocks: kv.Namespace) -> None:
    # Two layers of keys and values, paged: a block's pieces lie far from each other.
    cache = torch.randn(2, 2, 8, 16, 4, dtype=torch.float32)
    expected = cache.clone()

    def pieces(cache: torch.Tensor, page: int) -> list[torch.Tensor]:
        return [cache[layer, kind, page] for layer in range(2) for kind in range(2)]

    keys = [f"page {page}" for page in range(8)]
    assert blocks.store(keys, [pieces(cache, page) for page in range(8)]).wait(30).ok
    cache.zero_()
    moved = [3, 1, 0, 2, 7, 6, 5, 4]
    assert blocks.load(keys, [pieces(cache, moved[page]) for page in range(8)]).wait(30).ok
    for page in range(8):
        assert torch.equal(cache[:, :, moved[page]], expected[:, :, page])


def test_pieces_of_an_array(blocks: kv.Namespace) -> None:
    data = random_bytes(SIZE)
    blocks.store(["a"], [data]).wait(30)
    array = np.zeros((4, 3000), np.uint8)
    assert blocks.load(["a"], [[array[3], array[0]]]).wait(30).ok
    assert bytes(array[3]) + bytes(array[0]) == data
    assert not array[1:3].any()


def test_a_tensor_of_hoistway_can_be_stored(blocks: kv.Namespace, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.safetensors", {"a": ("BF16", [SIZE // 2])})
    tensor = hoistway.load_file(path, framework="raw")["a"]
    assert blocks.store(["a"], [tensor]).wait(30).ok
    assert load(blocks, "a") == tensor.tobytes()
    with pytest.raises(BufferError, match="read-only"):
        blocks.load(["a"], [tensor])


@pytest.mark.parametrize("kind", ["array", "rows", "signed", "lists", "flat lists"])
def test_addresses(blocks: kv.Namespace, kind: str) -> None:
    memory = np.frombuffer(random_bytes(8 * SIZE), np.uint8).copy()
    start = memory.ctypes.data
    flat = np.arange(4, dtype=np.uint64) * np.uint64(2 * SIZE) + np.uint64(start)
    half = SIZE // 2
    rows = np.stack([flat, flat + np.uint64(SIZE)], axis=1)
    addresses, sizes = {
        "array": (flat, SIZE),
        "rows": (rows, half),
        "signed": (rows.astype(np.int64), np.array([half, half])),
        "lists": (rows.tolist(), [[half, half]] * 4),
        "flat lists": (flat.tolist(), [SIZE] * 4),
    }[kind]
    keys = [f"block {number}" for number in range(4)]
    named = kv.Addresses(addresses, sizes, owner=memory)
    assert (len(named), named.device, named.owner is memory) == (4, "cpu", True)
    assert blocks.store(keys, named).wait(30).ok
    for number, key in enumerate(keys):
        place = 2 * SIZE * number
        second = place + (half if kind in ("array", "flat lists") else SIZE)
        expected = memory[place : place + half].tobytes() + memory[second : second + half].tobytes()
        assert load(blocks, key) == expected
    expected = memory.copy()
    memory[:] = 0
    assert blocks.load(keys, named).wait(30).ok
    for address in np.asarray(addresses).flatten().tolist():
        place = address - start
        assert np.array_equal(memory[place : place + half], expected[place : place + half])


def test_addresses_of_different_sizes(blocks: kv.Namespace) -> None:
    memory = np.frombuffer(random_bytes(100), np.uint8).copy()
    start = memory.ctypes.data
    named = kv.Addresses([[start, start + 10], [start + 40, start + 70]], [[10, 30], [20, 5]], owner=memory)
    assert blocks.store(["a", "b"], named).wait(30).ok
    assert load(blocks, "a", 40) == memory[:40].tobytes()
    assert load(blocks, "b", 25) == memory[40:60].tobytes() + memory[70:75].tobytes()


def test_addresses_that_make_no_sense_are_refused(blocks: kv.Namespace) -> None:
    for addresses, sizes in [
        (np.zeros(3, np.float64), 1),
        (np.zeros((1, 2, 3), np.uint64), 1),
        ([[1, 2], [3]], 1),
        ([1, 2], [1, 2, 3]),
        ([[1, 2]], [[1]]),
        ("text", 1),
        ([-1], 1),
    ]:
        with pytest.raises((ValueError, TypeError)):
            kv.Addresses(addresses, sizes)
    with pytest.raises(kv.Error, match="cuda:N"):
        kv.Addresses([1], 1, device="tpu")
    with pytest.raises(ValueError, match="2 keys"):
        blocks.load(["a", "b"], kv.Addresses([4096], 1))


def test_memory_that_cannot_be_used_is_refused_with_its_number(blocks: kv.Namespace) -> None:
    strided = np.zeros((10, 10), np.uint8)[:, ::2]
    for wrong, kind, why in [
        (b"read-only", BufferError, None),
        (np.frombuffer(b"read-only", np.uint8), BufferError, "not writable"),
        (strided, BufferError, "contiguous"),
        (torch.zeros(10, 10).T, BufferError, "contiguous"),
        (torch.zeros(2, dtype=torch.complex64).conj(), BufferError, "contiguous"),
        (torch.zeros(3, device="meta"), BufferError, "meta"),
        (12, TypeError, "neither a buffer nor a tensor"),
        (None, TypeError, "NoneType"),
        ("text", TypeError, "str"),
        ([bytearray(1), 12], TypeError, "int"),
    ]:
        with pytest.raises(kind, match=f"buffer 1: .*{why or ''}"):
            blocks.load(["a", "b"], [bytearray(4), wrong])
    for buffers in ([], [bytearray(4)] * 3):
        with pytest.raises(ValueError, match="2 keys"):
            blocks.load(["a", "b"], buffers)
    with pytest.raises(kv.RequestError):
        blocks.store(["a"], [b""])
    with pytest.raises(kv.RequestError):
        blocks.store(["a"], [[]])


def test_keys_that_no_block_can_have_are_refused(blocks: kv.Namespace) -> None:
    for key in (b"", b"x" * 1025, "é" * 513, b"x" * (1 << 20)):
        for ask in (
            lambda key=key: blocks.lookup([key]),
            lambda key=key: blocks.store([key], [b"x"]),
            lambda key=key: blocks.load([key], [bytearray(1)]),
        ):
            with pytest.raises(kv.RequestError, match="1 to 1024") as refused:
                ask()
            assert isinstance(refused.value, ValueError)
    for key in (1, None, bytearray(b"a"), ["a"]):
        with pytest.raises(TypeError, match="bytes or str"):
            blocks.lookup([key])  # type: ignore[list-item]
    for keys in (b"key", "key"):
        with pytest.raises(TypeError, match=r"write \[key\]"):
            blocks.lookup(keys)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one for each key"):
        blocks.load(["a"], [bytearray(1)], shard="0")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shards for 2"):
        blocks.load(["a"], [bytearray(1)], shard=[0, 1])


def test_a_buffer_that_the_caller_drops_lives_until_the_request_is_over(blocks: kv.Namespace) -> None:
    for number in range(50):
        data = random_bytes(100_000)
        expected = bytes(data)
        ticket = blocks.store([str(number)], [data])
        del data
        # The next owner of the memory writes over it.
        trash = [bytearray(b"\xff" * 100_000) for _ in range(4)]
        assert ticket.wait(30).ok
        assert load(blocks, str(number), 100_000) == expected
        del trash


def test_a_ticket_that_is_dropped_changes_nothing(store: kv.Store, blocks: kv.Namespace) -> None:
    data = [bytes(random_bytes(50_000)) for _ in range(20)]
    for number, own in enumerate(data):
        blocks.store([str(number)], [bytearray(own)])
    store.flush(30)
    for number, own in enumerate(data):
        assert load(blocks, str(number), 50_000) == own


def test_memory_goes_back_when_the_request_is_over(blocks: kv.Namespace) -> None:
    array = np.zeros(SIZE, np.uint8)
    gone = weakref.ref(array)
    buffer = bytearray(SIZE)
    ticket = blocks.store(["a", "b"], [array, buffer])
    ticket.wait(30)
    while not ticket.released():
        pass
    buffer.append(0)
    del array
    gc.collect()
    assert gone() is None, "nothing holds it, though the ticket is still there"
    assert ticket.done()


def test_a_request_that_is_refused_holds_nothing(blocks: kv.Namespace) -> None:
    buffer = bytearray(SIZE)
    with pytest.raises(TypeError):
        blocks.load(["a", "b"], [buffer, 12])
    with pytest.raises(kv.RequestError):
        blocks.load(["a", b""], [buffer, bytearray(1)])
    buffer.append(0)


def test_storage_that_a_tensor_gave_up_is_kept(blocks: kv.Namespace) -> None:
    tensor = torch.randint(0, 256, (200_000,), dtype=torch.uint8)
    expected = tensor.numpy().tobytes()
    ticket = blocks.store(["a"], [tensor])
    tensor.set_(torch.zeros(1, dtype=torch.uint8).untyped_storage())
    torch.full((200_000,), 255, dtype=torch.uint8)
    assert ticket.wait(30).ok
    assert load(blocks, "a", 200_000) == expected


def test_registered_memory_is_used_like_any_other(store: kv.Store, blocks: kv.Namespace) -> None:
    memory = mmap.mmap(-1, 1 << 20)
    region = store.register(memory)
    memory[:] = random_bytes(1 << 20)
    expected = memory[:]
    view = memoryview(memory)
    assert blocks.store(["a"], [view]).wait(30).ok
    view[:] = bytes(1 << 20)
    assert blocks.load(["a"], [view]).wait(30).ok
    assert memory[:] == expected
    view.release()
    with pytest.raises(BufferError):
        memory.close()
    del region
    memory.close()
    with pytest.raises((BufferError, TypeError, ValueError)):
        store.register(b"read-only")
