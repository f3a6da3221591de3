"""Starts llama.cpp's server as Ollama starts it, and asks it for tokens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any

from build import Build

# Much longer than any wait of a test that passes.
PATIENCE_SECONDS = 300


class Server:
    """A server, which ends with the block."""

    def __init__(
        self,
        built: Build,
        model: Path,
        *options: str,
        slots: int = 1,
        libraries: Path | None = None,
        **environment: str | Path,
    ) -> None:
        """Prepares to start the server.

        Args:
            built: Whose server.
            model: What it serves.
            options: More options of the server.
            slots: How many requests it computes at a time.
            libraries: Where to find llama.cpp's own libraries, if not where the server was built.
            environment: Variables of its environment.
        """
        self.lines: list[str] = []
        self._command = [
            str(built.llama_server),
            *("--model", str(model), "--host", "127.0.0.1", "--port", "0", "--no-webui", "--offline"),
            *("-c", str(256 * slots), "-np", str(slots), "--no-jinja", "--chat-template", "chatml"),
            *("-b", "512", "-ub", "512", "--context-shift", "--keep", "4", "--flash-attn", "auto"),
            *("--threads", "1", "--poll", "0", *options),
        ]
        self._environment = inherited() | {name: str(value) for name, value in environment.items()}
        if libraries:
            self._environment["LD_LIBRARY_PATH"] = str(libraries)
        self._listening = threading.Event()
        self._address = ""

    @property
    def log(self) -> str:
        """All that it has said."""
        return "\n".join(self.lines)

    @property
    def process_id(self) -> int:
        """For the kernel's counts."""
        return self._process.pid

    def __enter__(self) -> Server:
        """Waits until it answers."""
        self._start()
        assert self._listening.wait(PATIENCE_SECONDS), self.log
        assert self._address, self.log
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it, and waits until it has said what it has done."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._wait()

    def refused(self) -> str:
        """Starts it, and returns what it said as it ended without having listened."""
        self._start()
        assert self._wait() != 0, self.log
        assert not self._address
        return self.log

    def complete(self, prompt: list[int], count: int) -> list[int]:
        """Returns the most probable tokens after a prompt."""
        return self.complete_together([prompt], count)[0]

    def complete_together(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Returns the most probable tokens after prompts of one request, which the slots begin together."""
        question = completion(prompts[0] if len(prompts) == 1 else prompts, count)
        answers = self.post("/completion", question)
        tokens = [answer["tokens"] for answer in (answers if isinstance(answers, list) else [answers])]
        assert [len(of_prompt) for of_prompt in tokens] == [count] * len(prompts)
        return tokens

    def post(self, path: str, question: dict[str, Any]) -> Any:
        """Returns an answer; an HTTPError if it is one."""
        request = urllib.request.Request(
            self._address + path, json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)

    def stats(self) -> dict[str, Any]:
        """What its store of experts has done; said at the end."""
        said = re.findall(r"hoistway: experts: (\{.*\})", self.log)
        assert said, self.log
        return dict(json.loads(said[-1]))

    def peak_bytes(self) -> int:
        """The most memory that it has had, as the kernel counts."""
        status = Path(f"/proc/{self.process_id}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak
        return int(peak[1]) * 1024

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            found = re.search(r"listening on (http://\S+:\d+)", line)
            if found:
                self._address = found[1]
                self._listening.set()
        self._listening.set()

    def _wait(self) -> int:
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()


def completion(prompt: list[int] | list[list[int]], count: int) -> dict[str, Any]:
    """A question for the most probable tokens."""
    return {
        "prompt": prompt,
        "n_predict": count,
        "temperature": 0,
        "seed": 1,
        "cache_prompt": False,
        "return_tokens": True,
        "ignore_eos": True,
    }


def inherited() -> dict[str, str]:
    """The environment without what hoistway reads."""
    names = ("LLAMA_WEIGHT_SOURCE", "HOISTWAY_EXPERTS_BUDGET", "HOISTWAY_EXPERTS_POLICY")
    return {name: value for name, value in os.environ.items() if name not in names}
