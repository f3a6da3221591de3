"""Streams experts in a patched llama.cpp, as HOISTWAY_EXPERTS_BUDGET asks: in a program, and in its server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.error import HTTPError

import build
import models
import pytest
from build import Build
from server import Server, completion, inherited
from test_llama_cpp import made, run

PROMPT = [1, 300, 1700, 42, 999, 1024, 7, 512]
# The small model has 32 experts of 104 kB in each of 4 layers. The budgets hold all layers, a layer, and less.
BUDGETS = ["20MiB", "4MiB", "1258291"]


@pytest.fixture(scope="session")
def with_server() -> Build:
    return build.build_server()


@pytest.fixture(scope="session")
def small_with_tokens() -> Path:
    return models.make(build.DATA / "models/small-tokens.gguf", models.SMALL, tokenizer=True)


def streaming(budget: str) -> dict[str, str | Path]:
    """The environment that asks for it."""
    return {"LLAMA_WEIGHT_SOURCE": build.LIBRARY, "HOISTWAY_EXPERTS_BUDGET": budget}


def tokens_at_a_time(log: str) -> str:
    """To how many tokens batches were cut; 64 if they were not."""
    cut = re.search(r"hoistway: batches are cut from \d+ to (\d+) tokens", log)
    return cut[1] if cut else "64"


class TestProgram:
    """Any program that loads a model by llama.cpp's usual call."""

    @pytest.mark.parametrize("name", ["small", "split", "tied", "q4_0"])
    @pytest.mark.parametrize("budget", BUDGETS)
    def test_logits_are_those_of_a_stock_load(
        self, stock: Build, patched: Build, name: str, budget: str
    ) -> None:
        model = made(name)
        done = run(patched.logits, model, "--tokens", "48", **streaming(budget))
        at_a_time = tokens_at_a_time(done.log)
        assert (at_a_time == "64") == (budget != BUDGETS[-1])
        expected = run(stock.logits, model, "--tokens", "48", "--ubatch", at_a_time).result
        assert done.result["hash"] == expected["hash"]
        assert done.result["tokens"] == expected["tokens"]

    def test_a_mapped_load_maps_nothing_and_says_so(self, stock: Build, patched: Build, small: Path) -> None:
        expected = run(stock.logits, small).result["hash"]
        done = run(patched.logits, small, "--mode", "mmap", **streaming("4MiB"))
        assert done.result["hash"] == expected
        assert "read into memory, not mapped" in done.log

    @pytest.mark.parametrize("budget", ["4MiB", "20MiB"])
    def test_a_callback_of_the_program_sees_what_it_sees_without(
        self, stock: Build, patched: Build, small: Path, budget: str
    ) -> None:
        expected = run(stock.logits, small, "--watch", "--tokens", "16").result
        done = run(patched.logits, small, "--watch", "--tokens", "16", **streaming(budget)).result
        assert expected["watched_nodes"] > 0
        for what in ("hash", "watched_nodes", "watched_hash"):
            assert done[what] == expected[what]

    @pytest.mark.parametrize("policy", ["lru", "arc"])
    def test_the_policy_is_the_environments(
        self, stock: Build, patched: Build, small: Path, policy: str
    ) -> None:
        expected = run(stock.logits, small).result["hash"]
        done = run(patched.logits, small, HOISTWAY_EXPERTS_POLICY=policy, **streaming("4MiB"))
        assert done.result["hash"] == expected
        assert f'"policy":"{policy}"' in done.log.replace(" ", "")

    def test_a_model_without_experts_is_loaded_and_said(self, stock: Build, patched: Build) -> None:
        model = models.make(build.DATA / "models/dense.gguf", models.DENSE)
        done = run(patched.logits, model, **streaming("4MiB"))
        assert done.result["hash"] == run(stock.logits, model).result["hash"]
        assert "the model has no experts" in done.log

    def test_a_file_that_is_missing_bytes_is_refused(
        self, patched: Build, small: Path, tmp_path: Path
    ) -> None:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(small.read_bytes()[:-100_000])
        assert "cut.gguf" in self.refused(patched, cut, **streaming("4MiB"))

    def test_a_router_of_doubles_is_refused(self, patched: Build) -> None:
        model = models.make(build.DATA / "models/f64.gguf", models.SMALL, router="float64")
        said = self.refused(patched, model, **streaming("4MiB"))
        assert "blk.0.ffn_gate_inp.weight has the type F64" in said

    @pytest.mark.parametrize(
        ("budget", "reason"),
        [
            ("0.3MiB", "that one token uses in layer 0"),
            ("much", "HOISTWAY_EXPERTS_BUDGET=much is no size"),
            ("0", "HOISTWAY_EXPERTS_BUDGET=0 is no size"),
            ("4GiB per model", "is no size"),
            ("1.2.3MiB", "is no size"),
            ("4.MiB", "is no size"),
            (".5GiB", "is no size"),
            ("0.0000000001KiB", "is no size"),
            ("9223372036854775808", "is no size"),
            ("8388608TiB", "is no size"),
        ],
    )
    def test_a_budget_that_cannot_be_met_is_an_error(
        self, patched: Build, small: Path, budget: str, reason: str
    ) -> None:
        assert reason in self.refused(patched, small, **streaming(budget))

    def test_prompts_that_are_not_cut_need_a_budget_of_a_layer(self, patched: Build, small: Path) -> None:
        assert run(patched.logits, small, "--at-once", **streaming(BUDGETS[1])).result["loaded"]
        said = self.failed(patched, small, "--at-once", **streaming(BUDGETS[-1]))
        assert "less than a layer's experts, and this model computes all of a prompt at once" in said

    @pytest.mark.parametrize(
        ("budget", "budget_bytes"),
        [
            ("4194305", 4194305),
            ("4.5MB", 4500000),
            ("4.00000095367431640625MiB", (4 << 20) + 1),
            ("4.00000095367431640624MiB", 4 << 20),
        ],
    )
    def test_all_digits_of_a_budget_count(
        self, patched: Build, small: Path, budget: str, budget_bytes: int
    ) -> None:
        done = run(patched.logits, small, **streaming(budget))
        assert f'"budget_bytes":{budget_bytes},' in done.log.replace(" ", "")

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_an_image_needs_a_budget_of_a_layer(
        self, stock: Build, patched: Build, small: Path, budget: str
    ) -> None:
        if budget == BUDGETS[-1]:
            said = self.failed(patched, small, "--image", **streaming(budget))
            assert "the batch has no result: its 8 tokens are computed at once" in said
        else:
            expected = run(stock.logits, small, "--image").result["hash"]
            assert run(patched.logits, small, "--image", **streaming(budget)).result["hash"] == expected

    def test_training_is_refused(self, patched: Build, small: Path) -> None:
        assert "train without HOISTWAY_EXPERTS_BUDGET" in self.failed(
            patched, small, "--train", **streaming("20MiB")
        )

    def test_adapters_are_those_of_other_weights(
        self, stock: Build, patched: Build, small: Path, tmp_path: Path
    ) -> None:
        attention = models.make_adapter(tmp_path / "attention.gguf", models.SMALL, of_experts=False)
        expected = run(stock.logits, small, "--adapter", str(attention)).result["hash"]
        done = run(patched.logits, small, "--adapter", str(attention), **streaming("4MiB"))
        assert done.result["hash"] == expected
        assert expected != run(stock.logits, small).result["hash"]
        experts = models.make_adapter(tmp_path / "experts.gguf", models.SMALL, of_experts=True)
        said = self.failed(patched, small, "--adapter", str(experts), **streaming("4MiB"))
        assert "adapters of experts cannot be loaded with HOISTWAY_EXPERTS_BUDGET" in said

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_contexts_in_turn_and_another_load_compute_the_same(
        self, patched: Build, small: Path, budget: str
    ) -> None:
        done = run(patched.logits, small, "--again", "--tokens", "16", **streaming(budget))
        assert done.log.count("stay on the drive") == 2

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_a_router_on_a_device_chooses_experts_of_the_processor(
        self, stock: Build, patched: Build, small: Path, budget: str
    ) -> None:
        options = ("--device", "--cpu-moe", "--tokens", "16")
        done = run(patched.logits, small, *options, **streaming(budget))
        ubatch = ("--ubatch", tokens_at_a_time(done.log))
        assert done.result["hash"] == run(stock.logits, small, *options, *ubatch).result["hash"]
        assert re.search(r"CUDA0.* buffer size", done.log)

    def test_a_program_may_be_linked_with_the_library_too(self, patched: Build, small: Path) -> None:
        assert run(patched.beside, small).result["tensors"] > 0

    def test_an_unknown_policy_is_an_error(self, patched: Build, small: Path) -> None:
        said = self.refused(patched, small, HOISTWAY_EXPERTS_POLICY="random", **streaming("4MiB"))
        assert "ewma2" in said

    def test_without_a_library_the_budget_is_an_error(self, patched: Build, small: Path) -> None:
        said = self.refused(patched, small, HOISTWAY_EXPERTS_BUDGET="4MiB")
        assert "LLAMA_WEIGHT_SOURCE does not name hoistway's library" in said
        library = "/nonexistent/libhoistway.so"
        said = self.refused(patched, small, HOISTWAY_EXPERTS_BUDGET="4MiB", LLAMA_WEIGHT_SOURCE=library)
        assert f"LLAMA_WEIGHT_SOURCE={library} cannot be used" in said

    def test_experts_of_a_device_are_refused(self, patched: Build, small: Path) -> None:
        said = self.refused(patched, small, "--device", **streaming("4MiB"))
        assert "experts are streamed to memory of the host alone" in said

    def test_weights_that_are_to_be_checked_are_refused(self, patched: Build, small: Path) -> None:
        said = self.refused(patched, small, "--check", **streaming("4MiB"))
        assert "all weights are to be checked: choose one" in said

    @staticmethod
    def refused(patched: Build, model: Path, *options: str, **environment: str | Path) -> str:
        """What the program said as llama.cpp did not load the model, of which it read no weights."""
        said = TestProgram.failed(patched, model, *options, **environment)
        assert "hoistway: read" not in said
        return said

    @staticmethod
    def failed(patched: Build, model: Path, *options: str, **environment: str | Path) -> str:
        """What the program said as llama.cpp refused something."""
        done = subprocess.run(
            [patched.logits, *options, model],
            check=False,
            capture_output=True,
            text=True,
            env=inherited() | {name: str(value) for name, value in environment.items()},
        )
        assert done.returncode == 1 or '"loaded": false' in done.stdout, done.stderr[-3000:]
        return done.stderr


class TestServer:
    """llama.cpp's server, with the flags that Ollama gives it."""

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_tokens_are_those_of_stock(
        self, stock: Build, with_server: Build, small_with_tokens: Path, budget: str
    ) -> None:
        with Server(with_server, small_with_tokens, **streaming(budget)) as streamed:
            tokens = streamed.complete(PROMPT, 48)
        ubatch = ("--ubatch-size", tokens_at_a_time(streamed.log))
        with Server(with_server, small_with_tokens, *ubatch, libraries=stock.folder / "bin") as unpatched:
            expected = unpatched.complete(PROMPT, 48)
        assert tokens == expected
        assert "hoistway" not in unpatched.log
        stats = streamed.stats()
        assert stats["misses"] > 0
        assert stats["peak_bytes"] <= stats["budget_bytes"] + stats["largest_batch_bytes"]

    def test_what_slots_compute_together_stays_within_the_budget(
        self, with_server: Build, small_with_tokens: Path
    ) -> None:
        prompts = [[1, *range(first, first + 24)] for first in (300, 600, 900, 1200)]
        with Server(with_server, small_with_tokens, slots=4, **streaming(BUDGETS[-1])) as server:
            server.complete_together(prompts, 24)
        # llama.cpp computes a token more if each is of another slot.
        assert tokens_at_a_time(server.log) == "1"
        assert "a batch of 2 tokens uses" in server.log
        stats = server.stats()
        assert stats["largest_batch_bytes"] <= stats["budget_bytes"]
        assert stats["peak_bytes"] <= stats["budget_bytes"] + stats["largest_batch_bytes"]

    def test_a_budget_of_one_token_is_refused_for_several_slots(
        self, with_server: Build, small_with_tokens: Path
    ) -> None:
        with Server(with_server, small_with_tokens, **streaming("0.6MiB")) as server:
            assert len(server.complete(PROMPT, 4)) == 4
        said = Server(with_server, small_with_tokens, slots=2, **streaming("0.6MiB")).refused()
        assert "several sequences are computed together" in said

    def test_memory_is_the_budget_and_what_a_model_without_experts_takes(self, with_server: Build) -> None:
        shape = models.of_size(232)
        model = models.make(build.DATA / "models/server.gguf", shape, tokenizer=True)
        experts = shape.layers * shape.experts * models.expert_bytes(shape)
        with Server(with_server, model, "--load-mode", "none") as resident:
            expected = resident.complete(PROMPT, 16)
            resident_bytes = resident.peak_bytes()
        with Server(with_server, model, **streaming("40MiB")) as streamed:
            assert streamed.complete(PROMPT, 16) == expected
            streamed_bytes = streamed.peak_bytes()
        stats = streamed.stats()
        # The store has threads and memory of its own.
        limit = resident_bytes - experts + stats["budget_bytes"] + stats["largest_batch_bytes"] + (32 << 20)
        assert streamed_bytes <= limit
        assert limit < resident_bytes

    def test_a_read_that_fails_is_an_answer_and_the_server_goes_on(
        self, with_server: Build, small_with_tokens: Path, tmp_path: Path
    ) -> None:
        shrinks = tmp_path / "shrinks.gguf"
        shutil.copy(small_with_tokens, shrinks)
        with Server(with_server, shrinks, **streaming(BUDGETS[-1])) as server:
            whole = server.complete(PROMPT, 8)
            os.truncate(shrinks, 100_000)
            with pytest.raises(HTTPError) as failed:
                server.post("/completion", completion(PROMPT, 64))
            assert failed.value.code == 500
            failed.value.close()
            with pytest.raises(HTTPError) as again:
                server.post("/completion", completion(PROMPT, 64))
            again.value.close()
        assert len(whole) == 8
        assert re.search(r"the batch has no result: expert \d+ of layer \d+ could not be read", server.log)

    def test_memory_is_not_locked_and_streamed(self, with_server: Build, small_with_tokens: Path) -> None:
        said = Server(with_server, small_with_tokens, "--load-mode", "mlock", **streaming("4MiB")).refused()
        assert "weights are to be locked in memory: choose one" in said
