"""Ctrl-C ends every call, whatever the server does: says nothing, trickles, or has a name that is never found.

The library gives such a server up after a minute: a call that ends before has been ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_model
from python_server import Server

# Less than the minute after which the library gives such a server up.
WATCHDOG = 40

TENSORS: dict[str, tuple[str, list[int]]] = {
    "small": ("U8", [100_000]),
    **{f"model.layers.{layer}.up": ("U8", [1_000_000]) for layer in range(6)},
    "large": ("U8", [3_000_000]),
}

CALLS = {
    "load_file": "hoistway.load_file(url, framework='numpy')",
    "load": "checkpoint.load()",
    "load by threads": "checkpoint.load(route='threads')",
    "iter_tensors": "list(checkpoint.iter_tensors(max_in_flight=1 << 20))",
    "get_tensor": "checkpoint.get_tensor('small')",
    "get_slice": "checkpoint.get_slice('large')[5:9]",
    "copy_into": "checkpoint.copy_into({'large': np.zeros(3_000_000, np.uint8)})",
    "iter_tensors(copy_into)": """list(checkpoint.iter_tensors(copy_into={'large': np.zeros(3_000_000, np.uint8)}))""",
    "read": "hoistway.Reader(checkpoint, framework='numpy').read(['large', 'small'])",
    "read by http": "hoistway.Reader(checkpoint, framework='numpy', route='http').read(['large'])",
    "manifest": "checkpoint.manifest()",
    "stream_layers": "list(layers)",
    "doctor": "hoistway.doctor(url)",
    "experts": "hoistway.experts.ExpertCatalog.open(checkpoint)",
}


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    int (*resolver)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    if (node && !strcmp(node, "hangs.test")) {
        if (!access(getenv("HANG"), F_OK)) {
            close(open(getenv("HANGS"), O_CREAT | O_WRONLY, 0600));
            for (;;) pause();
        }
        node = "127.0.0.1";
    }
    return resolver(node, service, hints, found);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A resolver whose look-ups can hang."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "shim.c", "-ldl"], check=True)
    return library


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(write_model(tmp_path / "model.safetensors", TENSORS).read_bytes())
    yield server
    server.close()


SCRIPT = """
    import signal, sys
    from pathlib import Path
    import numpy as np
    import hoistway, hoistway.experts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    url = sys.argv[1]
    checkpoint = hoistway.open(url, framework="numpy")
    layers = hoistway.stream_layers(url, budget="2200000", framework="numpy")
    print("open", flush=True)
    input()
    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        names = {{path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}}
        # Who waits for a stream's layer goes on for the next call.
        if "hoistway-wait" in names and sys.argv[2] not in ("doctor", "stream_layers"):
            print("it goes on", flush=True)
    # What is left ends with the interpreter.
    """


@pytest.mark.parametrize("trouble", ["silent", "trickling", "no address"])
@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends_the_call(server: Server, shim: Path, tmp_path: Path, call: str, trouble: str) -> None:
    hang, hangs = tmp_path / "hang", tmp_path / "hangs"
    environment = {**os.environ, "LD_PRELOAD": str(shim), "HANG": str(hang), "HANGS": str(hangs)}
    script = textwrap.dedent(SCRIPT).format(call=CALLS[call])
    command = [sys.executable, "-c", script, f"http://hangs.test:{server.port}/model.safetensors", call]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line == "open\n", child.communicate()[1]
        if trouble == "no address":
            hang.touch()
        server.trouble = trouble
        child.stdin.write("\n")
        child.stdin.flush()
        end = time.monotonic() + WATCHDOG
        while not (hangs.exists() if trouble == "no address" else server.met.is_set()):
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        output, error = child.communicate(timeout=WATCHDOG)
    assert (child.returncode, output) == (0, "interrupted\n"), error
