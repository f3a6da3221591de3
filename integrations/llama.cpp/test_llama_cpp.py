"""Loads models with llama.cpp, stock and patched, and compares the logits bit by bit.

`just test-llama-cpp` runs this, with the C library that `just capi` has made. A stand-in for the library serves only
where hoistway itself would not do what is tested.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build
import models
import pytest
from build import Build


@dataclass(frozen=True)
class Run:
    """What a program printed."""

    result: dict[str, Any]
    log: str

    @property
    def said(self) -> list[str]:
        """The lines that are hoistway's."""
        return [line for line in self.log.splitlines() if line.startswith("hoistway:")]

    @property
    def delivered(self) -> int:
        """How many tensors hoistway read, over all batches of the load."""
        return sum(int(count) for count in re.findall(r"hoistway: read (\d+) tensors", self.log))

    @property
    def left(self) -> int:
        """How many of those that it was asked for it did not read."""
        return sum(int(count) for count in re.findall(r"hoistway: (\d+) tensors are left", self.log))


def run(program: Path, model: Path, *options: str, **environment: str | Path) -> Run:
    """Runs a program on a model."""
    names = ("LLAMA_WEIGHT_SOURCE", "HOISTWAY_EXPERTS_BUDGET", "HOISTWAY_EXPERTS_POLICY")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [program, *options, model],
        check=False,
        capture_output=True,
        text=True,
        env=inherited | {name: str(value) for name, value in environment.items()},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Run(json.loads(done.stdout), done.stderr)


@pytest.fixture(scope="session")
def library() -> Path:
    return build.LIBRARY


@pytest.fixture(
    scope="session", params=["small", "split", "tied", "q4_0", "middle"], ids=lambda name: f"{name}-model"
)
def model(request: pytest.FixtureRequest) -> Path:
    return made(request.param)


@pytest.fixture(scope="session")
def expected(stock: Build, model: Path) -> str:
    """The hash of the logits of a stock load."""
    return run(stock.logits, model).result["hash"]


def made(name: str) -> Path:
    folder = build.DATA / "models"
    if name == "split":
        return models.make(folder / "split.gguf", models.SMALL, split_bytes=4_000_000)
    if name == "tied":
        return models.make(folder / "tied.gguf", models.SMALL, tied=True)
    if name == "q4_0":
        return models.make(folder / "q4_0.gguf", models.SMALL, quantization="Q4_0")
    return models.make(folder / f"{name}.gguf", models.SMALL if name == "small" else models.MIDDLE)


def tensors_in(model: Path) -> int:
    """Tensors of a model in one file."""
    with model.open("rb") as file:
        return int.from_bytes(file.read(16)[8:], "little")


class TestLogits:
    """They are those of a stock load, with either reader of the weights."""

    def test_without_a_library_nothing_changes_and_nothing_is_said(
        self, patched: Build, model: Path, expected: str
    ) -> None:
        done = run(patched.logits, model)
        assert done.result["hash"] == expected
        assert done.said == []

    def test_an_absent_library_is_warned_of_once(self, patched: Build, model: Path, expected: str) -> None:
        done = run(patched.logits, model, LLAMA_WEIGHT_SOURCE="/nonexistent/libhoistway.so")
        assert done.result["hash"] == expected
        assert len(done.said) == 1
        assert "LLAMA_WEIGHT_SOURCE=/nonexistent/libhoistway.so cannot be used" in done.said[0]

    def test_a_library_delivers_every_tensor(
        self, patched: Build, library: Path, model: Path, expected: str
    ) -> None:
        done = run(patched.logits, model, LLAMA_WEIGHT_SOURCE=library)
        assert done.result["hash"] == expected
        assert done.left == 0
        assert done.delivered > 0
        if "-of-" not in model.name:
            # A tensor that is the embedding and the output is loaded once.
            assert done.delivered == tensors_in(model)

    def test_what_a_library_fails_to_read_llama_cpp_reads(
        self, patched: Build, library: Path, model: Path, expected: str
    ) -> None:
        done = run(patched.logits, model, LLAMA_WEIGHT_SOURCE=patched.every_tenth_fails, FORWARD_TO=library)
        assert done.result["hash"] == expected
        assert done.left > 0
        assert done.delivered > 5 * done.left

    def test_an_unpatched_llama_cpp_is_filled_by_the_example(
        self, stock: Build, model: Path, expected: str
    ) -> None:
        assert run(stock.load_from_user, model).result["hash"] == expected


class TestConduct:
    """What a load does besides reading."""

    def test_progress_never_falls_and_ends_at_one(self, patched: Build, library: Path, small: Path) -> None:
        for environment in (
            {},
            {"LLAMA_WEIGHT_SOURCE": library},
            {"LLAMA_WEIGHT_SOURCE": patched.every_tenth_fails, "FORWARD_TO": library},
        ):
            done = run(patched.logits, small, **environment)
            assert done.result["progress"] == 1.0
            assert not done.result["progress_fell"]

    @pytest.mark.parametrize("part", ["0", "0.3", "1"])
    def test_the_progress_callback_cancels(self, patched: Build, library: Path, part: str) -> None:
        done = run(patched.logits, made("middle"), "--cancel-at", part, LLAMA_WEIGHT_SOURCE=library)
        assert not done.result["loaded"]
        assert "hoistway: version" in done.log

    @pytest.mark.parametrize("mode", ["mmap", "dio"])
    def test_a_mapped_model_is_left_alone_and_a_direct_one_is_read(
        self, patched: Build, library: Path, small: Path, mode: str
    ) -> None:
        without = run(patched.logits, small, "--mode", mode)
        done = run(patched.logits, small, "--mode", mode, LLAMA_WEIGHT_SOURCE=library)
        assert done.result["hash"] == without.result["hash"]
        assert done.delivered == (0 if mode == "mmap" else tensors_in(small))

    def test_tensors_to_be_checked_are_read_by_llama_cpp(
        self, patched: Build, library: Path, small: Path
    ) -> None:
        done = run(patched.logits, small, "--check", LLAMA_WEIGHT_SOURCE=library)
        assert done.result["loaded"]
        assert done.delivered == 0

    def test_tensors_that_are_repacked_are_read_by_llama_cpp(
        self, stock: Build, patched: Build, library: Path
    ) -> None:
        model = made("q4_0")
        done = run(patched.logits, model, "--repack", LLAMA_WEIGHT_SOURCE=library)
        assert done.result["hash"] == run(stock.logits, model, "--repack").result["hash"]
        assert 0 < done.delivered < tensors_in(model)

    def test_a_library_of_another_version_is_refused(self, patched: Build, small: Path) -> None:
        without = run(patched.logits, small)
        done = run(patched.logits, small, LLAMA_WEIGHT_SOURCE=patched.stand_in, STAND_IN_ABI_VERSION="2")
        assert done.result["hash"] == without.result["hash"]
        assert len(done.said) == 1
        assert "version 2, not 1" in done.said[0]

    def test_a_library_without_its_functions_is_refused(self, patched: Build, small: Path) -> None:
        done = run(
            patched.logits,
            small,
            LLAMA_WEIGHT_SOURCE=patched.folder / "bin/libggml-base.so",
        )
        assert done.result["loaded"]
        assert len(done.said) == 1
        assert "it has no function hoistway_abi_version" in done.said[0]

    def test_a_library_that_makes_no_reader_is_warned_of(self, patched: Build, small: Path) -> None:
        without = run(patched.logits, small)
        done = run(patched.logits, small, LLAMA_WEIGHT_SOURCE=patched.stand_in, STAND_IN_NO_READER="1")
        assert done.result["hash"] == without.result["hash"]
        assert done.delivered == 0
        assert "no reader" in done.said[-1]


class TestDevice:
    """Weights in the memory of a device, which is the host's here, and whose hoistway is the stand-in."""

    def test_the_devices_number_is_found_by_its_bus_id(
        self, stock: Build, patched: Build, small: Path
    ) -> None:
        expected = run(stock.logits, small, "--device").result["hash"]
        done = run(
            patched.logits,
            small,
            "--device",
            LLAMA_WEIGHT_SOURCE=patched.stand_in,
            LD_LIBRARY_PATH=patched.folder / "driver",
        )
        assert done.result["hash"] == expected
        # One batch for the host's tensors and one for the device's.
        assert len(re.findall(r"hoistway: read", done.log)) == 2
        assert done.delivered == tensors_in(small)

    def test_a_device_that_cuda_does_not_know_is_left_to_llama_cpp(
        self, stock: Build, patched: Build, small: Path
    ) -> None:
        expected = run(stock.logits, small, "--device").result["hash"]
        done = run(patched.logits, small, "--device", LLAMA_WEIGHT_SOURCE=patched.stand_in)
        assert done.result["hash"] == expected
        assert 0 < done.delivered < tensors_in(small)


class TestExample:
    """What the example refuses."""

    def test_a_split_model_is_not_loaded_by_a_later_file(self, stock: Build) -> None:
        second = made("split").with_name("split-00002-of-00005.gguf")
        done = subprocess.run([stock.load_from_user, second], check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert "is a later file of a split model" in done.stderr

    def test_what_is_no_model_is_refused(self, stock: Build) -> None:
        done = subprocess.run([stock.load_from_user, __file__], check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert "is no GGUF file" in done.stderr


class TestStreamedExperts:
    """Models whose experts hoistway reads as their routers choose them."""

    @staticmethod
    def failed(stock: Build, model: Path, *options: str) -> str:
        command = [stock.stream_experts, *options, model]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr

    @pytest.mark.parametrize("name", ["small", "split", "tied", "q4_0"])
    @pytest.mark.parametrize("budget", ["20", "4", "1.2"])
    def test_logits_are_those_of_a_stock_load(self, stock: Build, name: str, budget: str) -> None:
        model = made(name)
        options = ["--tokens", "48"]
        done = run(stock.stream_experts, model, *options, "--budget-mib", budget)
        # The last budget does not hold all experts of a layer. llama.cpp's own last bits change with the batch.
        cut = re.search(r"batches are cut from 64 to (\d+) tokens", done.log)
        assert bool(cut) == (budget == "1.2")
        expected = run(stock.logits, model, *options, "--ubatch", cut[1] if cut else "64").result
        assert done.result["hash"] == expected["hash"]
        assert done.result["tokens"] == expected["tokens"]
        stats = done.result["stats"]
        assert stats["backing"] == "host_sparse"
        assert stats["peak_bytes"] <= stats["budget_bytes"] + stats["largest_batch_bytes"]
        assert (stats["evictions"] == 0) == (budget == "20")
        assert (not done.said) == (budget == "20")
        assert ("layers stream through it" in done.log) == (budget != "20")

    def test_every_policy_gives_the_same_logits(self, stock: Build, small: Path) -> None:
        expected = run(stock.logits, small, "--tokens", "16").result["hash"]
        for policy in ("lru", "slru", "lfu", "arc", "ewma2"):
            done = run(stock.stream_experts, small, "--tokens", "16", "--budget-mib", "4", "--policy", policy)
            assert done.result["hash"] == expected
            assert done.result["stats"]["policy"] == policy

    def test_a_batch_that_may_not_fit_is_cut(self, stock: Build, small: Path) -> None:
        done = run(stock.stream_experts, small, "--tokens", "2", "--budget-mib", "0.9")
        assert any("batches are cut from 64 to" in line for line in done.said)
        stats = done.result["stats"]
        assert stats["largest_batch_bytes"] <= stats["budget_bytes"]

    @pytest.mark.parametrize("budget", ["20", "1.2"])
    def test_a_trace_has_what_the_routers_chose(
        self, stock: Build, small: Path, tmp_path: Path, budget: str
    ) -> None:
        path = tmp_path / "trace.jsonl"
        options = ["--tokens", "12", "--budget-mib", budget]
        done = run(stock.stream_experts, small, *options, "--trace", str(path))
        assert done.result["hash"] == run(stock.stream_experts, small, *options).result["hash"]
        header, *visits = [json.loads(line) for line in path.read_text().splitlines()]
        shape = models.SMALL
        assert header == {
            "hoistway_trace": 1,
            "model": "small.gguf",
            "experts_per_token": shape.experts_used,
            "layers": [
                {"layer": layer, "experts": shape.experts, "expert_bytes": models.expert_bytes(shape)}
                for layer in range(shape.layers)
            ],
        }
        # The prompt has eight tokens, of which the last layer computes the last alone.
        last = shape.layers - 1
        expected = {("prefill", step, layer) for step in range(8) for layer in range(last)}
        expected |= {("prefill", 7, last)}
        expected |= {("decode", step, layer) for step in range(8, 19) for layer in range(shape.layers)}
        assert [visit["turn"] for visit in visits] == [0] * len(expected)
        assert {(visit["phase"], visit["step"], visit["layer"]) for visit in visits} == expected
        for visit in visits:
            chosen = set(visit["experts"])
            assert len(chosen) == len(visit["experts"]) == shape.experts_used
            assert chosen < set(range(shape.experts))
        # What was requested for an answer is what was recorded for it; requests for a prompt name an expert once.
        cut = re.search(r"batches are cut from 64 to (\d+) tokens", done.log)
        at_a_time = int(cut[1]) if cut else 8
        requested: dict[tuple[int, int], set[int]] = {}
        for visit in visits:
            step = visit["step"] // at_a_time if visit["step"] < 8 else visit["step"]
            requested.setdefault((step, visit["layer"]), set()).update(visit["experts"])
        stats = done.result["stats"]
        assert sum(map(len, requested.values())) == stats["hits"] + stats["misses"]

    def test_a_trace_that_cannot_be_written_is_an_error(
        self, stock: Build, small: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "absent/trace.jsonl"
        said = self.failed(stock, small, "--budget-mib", "4", "--trace", str(path))
        assert f"the trace {path} cannot be written" in said

    def test_a_budget_below_one_token_is_refused(self, stock: Build, small: Path) -> None:
        assert "that one token uses in layer 0" in self.failed(stock, small, "--budget-mib", "0.3")

    def test_an_unknown_policy_is_refused(self, stock: Build, small: Path) -> None:
        assert "ewma2" in self.failed(stock, small, "--budget-mib", "4", "--policy", "random")

    def test_a_router_of_doubles_is_refused(self, stock: Build) -> None:
        model = models.make(build.DATA / "models/f64.gguf", models.SMALL, router="float64")
        said = self.failed(stock, model, "--budget-mib", "4")
        assert "blk.0.ffn_gate_inp.weight has the type F64" in said

    def test_a_model_without_a_weight_is_refused(self, stock: Build) -> None:
        model = models.make(build.DATA / "models/no-norm.gguf", models.SMALL, without="attn_k_norm")
        said = self.failed(stock, model, "--budget-mib", "4")
        assert "attn_k_norm.weight is not in the file" in said

    def test_a_file_that_was_cut_short_is_refused(self, stock: Build, small: Path, tmp_path: Path) -> None:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(small.read_bytes()[:-100_000])
        assert "cut.gguf" in self.failed(stock, cut, "--budget-mib", "4")

    def test_a_file_that_shrinks_during_a_run_ends_it(
        self, stock: Build, small: Path, tmp_path: Path
    ) -> None:
        shrinks = tmp_path / "shrinks.gguf"
        shutil.copy(small, shrinks)
        command = [stock.stream_experts, "--budget-mib", "1.2", "--tokens", "240", shrinks]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            # The last line before the first token.
            assert any("batches are cut" in line for line in process.stderr)
            process.send_signal(signal.SIGSTOP)
            os.truncate(shrinks, 100_000)
            process.send_signal(signal.SIGCONT)
            printed, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert printed == ""
        assert re.search(r"expert \d+ of layer \d+ could not be read: .*shrinks.gguf", said)


class TestApply:
    """The script that patches a tree."""

    CHANGED = (
        "CMakeLists.txt",
        "llama-context.cpp",
        "llama-context.h",
        "llama-model-loader.cpp",
        "llama.cpp",
    )

    @pytest.fixture
    def source(self, stock: Build, tmp_path: Path) -> Path:
        (tmp_path / "src").mkdir()
        for name in self.CHANGED:
            shutil.copy(build.DATA / "stock/src" / name, tmp_path / "src")
        return tmp_path

    @staticmethod
    def apply(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, build.HERE / "apply.py", *arguments], check=False, capture_output=True, text=True
        )

    @staticmethod
    def contents(tree: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}

    def test_checking_changes_nothing(self, source: Path) -> None:
        before = self.contents(source)
        done = self.apply("--check", source)
        assert done.returncode == 0
        assert f"llama-cpp-python-{build.VERSION}.patch: fits" in done.stdout
        assert self.contents(source) == before

    def test_a_second_run_changes_nothing(self, source: Path) -> None:
        assert self.apply(source).returncode == 0
        before = self.contents(source)
        done = self.apply(source)
        assert done.returncode == 0
        assert "already applied" in done.stdout
        assert self.contents(source) == before

    def test_git_makes_the_same_of_the_patch(
        self, source: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        other = tmp_path_factory.mktemp("git")
        shutil.copytree(source / "src", other / "src")
        patch = build.HERE / "patches" / f"llama-cpp-python-{build.VERSION}.patch"
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(other.parent)}
        subprocess.run(["git", "apply", patch], check=True, cwd=other, env=environment)
        self.apply(source)
        for name in self.CHANGED:
            assert (source / "src" / name).read_text() == (other / "src" / name).read_text()

    def test_lines_keep_their_endings(self, source: Path) -> None:
        loader = source / "src/llama-model-loader.cpp"
        loader.write_bytes(loader.read_bytes().replace(b"\n", b"\r\n"))
        assert self.apply(source).returncode == 0
        text = loader.read_bytes()
        assert b"hoistway" in text
        assert text.count(b"\n") == text.count(b"\r\n")

    def test_a_tree_that_no_patch_fits_is_left_as_it_is(self, source: Path) -> None:
        loader = source / "src/llama-model-loader.cpp"
        loader.write_text(loader.read_text().replace("size_data != 0", "size_data > 0"))
        before = self.contents(source)
        done = self.apply(source)
        assert done.returncode == 1
        assert "no patch fits" in done.stderr
        assert "src/llama-model-loader.cpp differs" in done.stderr
        assert self.contents(source) == before

    def test_what_is_no_llama_cpp_is_refused(self, tmp_path: Path) -> None:
        done = self.apply(tmp_path)
        assert done.returncode == 1
        assert "is no source tree of llama.cpp" in done.stderr

    def test_ollama_gets_sources_and_the_patch(self, source: Path, tmp_path: Path) -> None:
        checkout = tmp_path / "ollama"
        compat = checkout / "llama/compat"
        compat.mkdir(parents=True)
        (compat / "compat.cmake").touch()
        (checkout / "LLAMA_CPP_VERSION").write_text("b10488\n")
        assert self.apply(checkout).returncode == 0
        assert sorted(path.name for path in compat.iterdir()) == [
            "005-hoistway-weights.patch",
            "compat.cmake",
            "hoistway-experts.cpp",
            "hoistway-experts.h",
            "hoistway-library.cpp",
            "hoistway-library.h",
            "hoistway-streaming.cpp",
            "hoistway-streaming.h",
            "hoistway-weights.cpp",
            "hoistway-weights.h",
            "hoistway.h",
            "hoistway.hpp",
        ]
        assert "CMakeLists" not in (compat / "005-hoistway-weights.patch").read_text()
        before = self.contents(checkout)
        assert "already in" in self.apply(checkout).stdout
        assert self.contents(checkout) == before

        (checkout / "LLAMA_CPP_VERSION").write_text("b99999\n")
        assert self.apply(checkout).returncode == 1
        # A tree that is there tells which patch fits, and git applies what was written.
        assert self.apply(checkout, "--llama-cpp", source).returncode == 0
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(source.parent)}
        patch = compat / "005-hoistway-weights.patch"
        subprocess.run(["git", "apply", patch], check=True, cwd=source, env=environment)
        assert "hoistway_weights" in (source / "src/llama-model-loader.cpp").read_text()
        assert "hoistway_experts_load" in (source / "src/llama.cpp").read_text()
