"""Makes a mixture of experts, and runs it with less memory than it takes: by mmap, and by hoistway."""

from __future__ import annotations

import argparse
import os
import sys

import build
import limited
import models

sys.path.insert(0, str(build.ROOT / "bench"))

from cache import put_into_state


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=440, help="megabytes of the model (default: 440)")
    parser.add_argument("--limit", type=int, help="MiB of memory (default: half of the model)")
    parser.add_argument("--tokens", type=int, default=32, help="how many to decode (default: 32)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"that compute (default: {cores})")
    arguments = parser.parse_args()
    threads = arguments.threads
    stock = build.build(patched=False)
    shape = models.of_size(arguments.size)
    model = models.make(build.DATA / f"models/demo-{shape.layers}.gguf", shape)
    limit = arguments.limit << 20 if arguments.limit else model.stat().st_size // 2
    budget = limited.budget_of(limit, model, shape)
    if budget <= 0:
        raise SystemExit(f"a limit of {limit >> 20} MiB leaves nothing for experts: take a larger one")
    print(
        f"{model.relative_to(build.ROOT)}: {shape.layers} layers of {shape.experts} experts, "
        f"{model.stat().st_size / 2**20:.0f} MiB, random weights. Memory: {limit / 2**20:.0f} MiB, "
        f"of which experts get {budget / 2**20:.0f} MiB. Threads: {threads}. The file is not cached.",
        flush=True,
    )
    ways = {
        "mmap": lambda: limited.run_stock(
            stock, model, mode="mmap", limit=limit, tokens=arguments.tokens, threads=threads
        ),
        "hoistway": lambda: limited.run_streamed(
            stock, model, budget=budget, limit=limit, tokens=arguments.tokens, threads=threads
        ),
    }
    results = {}
    for name, run in ways.items():
        put_into_state([str(model)], "cold")
        try:
            result = results[name] = run()
        except limited.NoLimitError as error:
            raise SystemExit(f"nothing was measured: {error}") from error
        if result.get("killed"):
            raise SystemExit(f"{name}: killed, as it took more memory than the limit")
        print(
            f"{name:>9}: {result['tokens_per_second']:8.2f} tokens/s, "
            f"the first after {result['first_token_seconds']:.2f} s",
            flush=True,
        )
    stats = results["hoistway"]["stats"]
    print(
        f"hoistway read {stats['bytes_per_token'] / 2**20:.1f} MiB a token, {stats['hit_rate']:.0%} of the experts "
        "were in memory."
    )
    if len({(result["hash"], *result["tokens"]) for result in results.values()}) != 1:
        raise SystemExit("the tokens differ")
    gain = results["hoistway"]["tokens_per_second"] / results["mmap"]["tokens_per_second"]
    print(
        f"hoistway is {gain:.1f} times as fast. The {arguments.tokens} tokens are equal, and so are all logits."
    )


if __name__ == "__main__":
    main()
