"""Moves blocks with the plug-in, by NIXL's own agent.

`just test-nixl` runs this, with the plug-in that it has built and NIXL from PyPI.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import textwrap
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TARGET = Path(__file__).parents[2] / "target"
PLUGIN = TARGET / "nixl/libplugin_HOISTWAY.so"
DRIVER = TARGET / "debug/libfake_cuda.so"
os.environ["NIXL_PLUGIN_DIR"] = str(PLUGIN.parent)
os.environ["HOISTWAY_CUDA_DRIVER"] = os.environ["HOISTWAY_CUFILE"] = str(DRIVER)

from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: E402

BLOCK = 300_000


class Agent:
    """An agent of NIXL with a store in `directory`, and memory of the host."""

    def __init__(self, directory: Path, **parameters: str) -> None:
        self.name = f"agent {directory.name}"
        self.nixl = nixl_agent(self.name, nixl_agent_config(backends=[]))
        defaults = {"root": str(directory), "capacity_bytes": str(64 << 20), "min_free_bytes": "1"}
        self.nixl.create_backend("HOISTWAY", defaults | {"namespace.model": "m@1"} | parameters)
        self.numbers: dict[str, int] = {}

    def begin(self, operation: str, places: list[tuple[str, int, np.ndarray]]) -> Any:
        """A transfer between memory and names of objects, from bytes of these on."""
        for key in {key for key, _, _ in places} - self.numbers.keys():
            self.numbers[key] = len(self.numbers) + 1
            self.nixl.register_memory([(0, 1 << 30, self.numbers[key], key)], "OBJ", ["HOISTWAY"])
        memory = [(array.ctypes.data, array.nbytes, 0) for _, _, array in places]
        self.nixl.register_memory([(*piece, "") for piece in memory], "DRAM", ["HOISTWAY"])
        objects = [(start, array.nbytes, self.numbers[key]) for key, start, array in places]
        return self.nixl.initialize_xfer(
            operation,
            self.nixl.get_xfer_descs(memory, "DRAM"),
            self.nixl.get_xfer_descs(objects, "OBJ"),
            self.name,
            backends=["HOISTWAY"],
        )

    def finish(self, transfer: Any) -> None:
        """Posts a transfer and waits for its end."""
        state = self.nixl.transfer(transfer)
        while state == "PROC":
            time.sleep(0.001)
            state = self.nixl.check_xfer_state(transfer)
        assert state == "DONE", state

    def move(self, operation: str, places: list[tuple[str, int, np.ndarray]]) -> None:
        """Moves bytes, once."""
        transfer = self.begin(operation, places)
        try:
            self.finish(transfer)
        finally:
            transfer.release()

    def found(self, *keys: str) -> list[bool]:
        """Which objects are there."""
        answers = self.nixl.query_memory([(0, 0, 0, key) for key in keys], "HOISTWAY", "OBJ")
        return [answer is not None for answer in answers]


def block(number: int) -> np.ndarray:
    """Bytes that no other block has."""
    return np.random.default_rng(number).integers(0, 256, BLOCK, dtype=np.uint8)


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path / "store")


def test_blocks_come_back_as_they_were_written(agent: Agent) -> None:
    stored = {f"block {number}": block(number) for number in range(5)}
    assert agent.found(*stored) == [False] * 5
    agent.move("WRITE", [(key, 0, array) for key, array in stored.items()])
    assert agent.found("block 4", "none", "block 0") == [True, False, True]
    loaded = {key: np.zeros(BLOCK, np.uint8) for key in stored}
    agent.move("READ", [(key, 0, array) for key, array in loaded.items()])
    assert all((loaded[key] == array).all() for key, array in stored.items())


def test_descriptors_of_one_object_are_its_pieces(agent: Agent) -> None:
    first, second = block(1), block(2)
    pieces = [
        ("b", 100_000, second[100_000:].copy()),
        ("a", 0, first[:1].copy()),
        ("b", 0, second[:100_000].copy()),
        ("a", 1, first[1:].copy()),
    ]
    agent.move("WRITE", pieces)
    whole = [np.zeros(BLOCK, np.uint8) for _ in range(2)]
    agent.move("READ", [("a", 0, whole[0]), ("b", 0, whole[1])])
    assert (whole[0] == first).all()
    assert (whole[1] == second).all()
    parts = [np.zeros_like(array) for _, _, array in pieces]
    agent.move("READ", [(key, start, part) for (key, start, _), part in zip(pieces, parts, strict=True)])
    assert all((part == array).all() for part, (_, _, array) in zip(parts, pieces, strict=True))


def test_a_transfer_can_be_posted_again(agent: Agent) -> None:
    agent.move("WRITE", [("a", 0, block(1))])
    memory = np.zeros(BLOCK, np.uint8)
    transfer = agent.begin("READ", [("a", 0, memory)])
    for _ in range(3):
        memory[:] = 0
        agent.finish(transfer)
        assert (memory == block(1)).all()
    transfer.release()


def test_what_cannot_be_loaded_is_an_error(agent: Agent) -> None:
    agent.move("WRITE", [("a", 0, block(1))])
    with pytest.raises(Exception, match="NOT_FOUND"):
        agent.move("READ", [("none", 0, np.zeros(BLOCK, np.uint8))])
    with pytest.raises(Exception, match="MISMATCH"):
        agent.move("READ", [("a", 0, np.zeros(BLOCK - 1, np.uint8))])
    with pytest.raises(Exception, match="INVALID_PARAM"):
        agent.move("WRITE", [("k" * 1025, 0, block(1))])
    for start in (1, 4096):
        with pytest.raises(Exception, match="INVALID_PARAM"):
            agent.begin("READ", [("a", start, np.zeros(10, np.uint8))])


def test_damage_is_an_error(agent: Agent, tmp_path: Path) -> None:
    agent.move("WRITE", [("a", 0, block(1))])
    [(file, at)] = [
        (file, at)
        for file in tmp_path.rglob("*")
        if file.is_file() and (at := file.read_bytes().find(block(1).tobytes())) >= 0
    ]
    with file.open("r+b") as segment:
        segment.seek(at + 1000)
        segment.write(bytes([block(1)[1000] ^ 1]))
    with pytest.raises(Exception, match="BACKEND"):
        agent.move("READ", [("a", 0, np.zeros(BLOCK, np.uint8))])
    assert agent.found("a") == [False]


def test_another_agent_finds_what_this_one_stored(agent: Agent, tmp_path: Path) -> None:
    agent.move("WRITE", [("a", 0, block(1))])
    reader = Agent(tmp_path / "store", access="read", capacity_bytes="")
    other = Agent(tmp_path / "store", access="read", capacity_bytes="", **{"namespace.dtype": "float16"})
    memory = np.zeros(BLOCK, np.uint8)
    reader.move("READ", [("a", 0, memory)])
    assert (memory == block(1)).all()
    assert other.found("a") == [False]
    with pytest.raises(Exception, match="NOT_ALLOWED"):
        reader.move("WRITE", [("b", 0, block(2))])


def test_ranks_have_blocks_of_their_own(tmp_path: Path) -> None:
    ranks = [
        Agent(tmp_path / "store", **{"namespace.tensor_rank": rank, "namespace.tensor_ranks": "2"})
        for rank in ("0", "1")
    ]
    ranks[0].move("WRITE", [("a", 0, block(1))])
    assert [rank.found("a") for rank in ranks] == [[True], [False]]


def test_an_object_without_a_name_is_looked_up_by_its_number(agent: Agent) -> None:
    agent.numbers[""] = 7
    agent.nixl.register_memory([(0, 1 << 30, 7, "")], "OBJ", ["HOISTWAY"])
    agent.move("WRITE", [("", 0, block(1))])
    answers = agent.nixl.query_memory([(0, 0, number, "") for number in (7, 8)], "HOISTWAY", "OBJ")
    assert [answer is not None for answer in answers] == [True, False]


def test_releasing_a_transfer_ends_it(agent: Agent) -> None:
    transfers = [agent.begin("WRITE", [(f"block {number}", 0, block(number))]) for number in range(8)]
    for transfer in transfers:
        agent.nixl.transfer(transfer)
    for transfer in transfers:
        transfer.release()


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"capacity": "1"}, "there is no parameter capacity"),
        ({"capacity_bytes": "1 GiB"}, "is no number: 1 GiB"),
        ({"namespace.layers": str(1 << 32)}, "namespace.layers is too large"),
        ({"namespace.tensor_rank": "2", "namespace.tensor_ranks": "2"}, "tensor_parallel cannot be (2, 2)"),
        ({"namespace.tensor_rank": "1"}, "tensor_parallel cannot be (1, 0)"),
        ({"durability": "perhaps"}, "durability cannot be perhaps"),
        ({"root": ""}, "root is NULL"),
    ],
)
def test_a_store_that_cannot_be_opened_says_why(
    parameters: dict[str, str], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="BACKEND"):
        Agent(tmp_path, **parameters)
    assert reason in capfd.readouterr().err


def test_blocks_move_to_and_from_memory_of_a_device(agent: Agent) -> None:
    driver = ctypes.CDLL(str(DRIVER))
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    addresses = [ctypes.c_uint64(), ctypes.c_uint64()]
    for address in addresses:
        assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(BLOCK)) == 0
    memory = block(1)
    driver.cuMemcpyHtoD_v2(addresses[0], ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(BLOCK))
    pieces = [(address.value, BLOCK, 1) for address in addresses]
    agent.nixl.register_memory([(*piece, "") for piece in pieces], "VRAM", ["HOISTWAY"])
    agent.nixl.register_memory([(0, BLOCK, 1, "a")], "OBJ", ["HOISTWAY"])
    for operation, piece in zip(["WRITE", "READ"], pieces, strict=True):
        local = agent.nixl.get_xfer_descs([piece], "VRAM")
        remote = agent.nixl.get_xfer_descs([(0, BLOCK, 1)], "OBJ")
        agent.finish(agent.nixl.initialize_xfer(operation, local, remote, agent.name))
    loaded = np.zeros(BLOCK, np.uint8)
    driver.cuMemcpyDtoH_v2(ctypes.c_void_p(loaded.ctypes.data), addresses[1], ctypes.c_size_t(BLOCK))
    assert (loaded == memory).all()


def test_memory_of_a_device_that_is_not_there_is_refused(
    agent: Agent, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="BACKEND"):
        agent.nixl.register_memory([(4096, 4096, 15, "")], "VRAM", ["HOISTWAY"])
    assert "hoistway: registering memory" in capfd.readouterr().err


def test_the_program_of_the_documentation_stores_a_block(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/kv/nixl.md").read_text()
    program = textwrap.dedent(text.split("```python\n")[1].split("```")[0])
    for written, here in [
        ("nixl._api", "nixl_cu12._api"),
        ("/mnt/nvme/kv", str(tmp_path)),
        ("100 << 30", "64 << 20"),
    ]:
        assert written in program
        program = program.replace(written, here)
    memory = block(1)
    names = {"address": memory.ctypes.data, "length": memory.nbytes}
    exec(program, names)
    while names["agent"].check_xfer_state(names["write"]) == "PROC":
        time.sleep(0.001)
    reader = Agent(tmp_path, **{"namespace.model": "llama@1"})
    loaded = np.zeros(BLOCK, np.uint8)
    reader.move("READ", [("tokens 0..16", 0, loaded)])
    assert (loaded == memory).all()


def test_nixl_tells_of_the_plug_in(agent: Agent) -> None:
    assert "HOISTWAY" in agent.nixl.get_plugin_list()
    assert sorted(agent.nixl.get_plugin_mem_types("HOISTWAY")) == ["DRAM_SEG", "OBJ_SEG", "VRAM_SEG"]
    assert {"root", "capacity_bytes", "namespace.model"} <= agent.nixl.get_plugin_params("HOISTWAY").keys()
    assert agent.nixl.get_backend_params("HOISTWAY")["namespace.model"] == "m@1"


def virtual_functions(library: Path, engine: str) -> list[set[str]]:
    """The functions in the table of an engine, in their order, without the name of the class.

    Functions that do the same may be one, which has the names of all.
    """

    def rows(pattern: str, *command: str) -> list[tuple[str, ...]]:
        said = subprocess.run([*command, str(library)], check=True, capture_output=True, text=True)
        return re.findall(pattern, said.stdout, re.MULTILINE)

    symbols = rows(r"^(\w+) (\w+) \w (.*)$", "nm", "--demangle", "--print-size")
    [(start, size)] = [(at, size) for at, size, name in symbols if name == f"vtable for {engine}"]
    names: dict[int, set[str]] = defaultdict(set)
    for at, _, name in symbols:
        names[int(at, 16)].add(re.sub(r"^nixl\w+::|^\(anonymous namespace\)::Engine::", "", name))
    # Functions that others may replace are named, the rest are addresses.
    relocations = rows(r"^(\w+) +\w+ +R_X86_64_(RELATIVE|64) +(\w+)", "readelf", "--relocs", "--wide")
    targets = {int(at, 16): names[int(value, 16)] for at, _, value in relocations}
    # Before the functions stand two words; the first two functions are destructors.
    functions = range(int(start, 16) + 32, int(start, 16) + int(size, 16), 8)
    return [targets[at] for at in functions]


def test_the_interface_is_that_of_the_plug_ins_of_nixl() -> None:
    import nixl_cu12  # noqa: PLC0415

    theirs = Path(nixl_cu12.__file__).parents[1] / ".nixl_cu12.mesonpy.libs/plugins/libplugin_POSIX.so"
    expected = virtual_functions(theirs, "nixlPosixEngine")
    assert len(expected) == 25
    ours = virtual_functions(PLUGIN, "(anonymous namespace)::Engine")
    assert [(own, other) for own, other in zip(ours, expected, strict=True) if not own & other] == []
    assert any("queryMem" in name for name in ours[23])
