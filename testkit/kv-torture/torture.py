"""Mistreats the KV store in every way that `kv-torture` knows, and writes down what came of it."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from powercut import cut_power

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from host import machine


def run(arguments: argparse.Namespace, command: str, *options: object) -> dict[str, Any]:
    """One trial of the program, in a fresh directory."""
    root = arguments.directory / "store"
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    parts = [str(part) for part in (arguments.program, command, root, *options)]
    done = subprocess.run(parts, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(parts)} failed: {done.stdout}")
    shutil.rmtree(root)
    return json.loads(done.stdout)


def kill(arguments: argparse.Namespace) -> dict[str, Any]:
    """Half of the kills where there is room for all blocks, half where blocks are evicted all the time."""
    rounds = arguments.kills // 2
    roomy = ("--capacity", 16 << 30, "--block-bytes", 16 << 10)
    return {
        "roomy": run(arguments, "kill", "--rounds", rounds, *roomy),
        "tight": run(arguments, "kill", "--rounds", arguments.kills - rounds, "--may-evict"),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    host = results["host"]
    lines = [
        "# The KV store, mistreated",
        "",
        f"{host['processor']}, {host['cores']} cores; {host['kernel']}; {host['date']}, commit {host['commit']}.",
        " ".join(["Made by `just torture-kv`.", *([results["note"]] if results["note"] else [])]),
    ]
    if results["cuts"]:
        lines += [
            "",
            "## Power cuts",
            "A writer stores and deletes blocks of 1 byte to 128 KiB with up to 3 shards, 8 requests at a time, while",
            "the power of its disk is cut at random moments. A *cloned* disk keeps everything that was written to it.",
            "A *recorded* one keeps what was flushed, and of later writes all, none, some, or some of their sectors",
            "of 512 bytes. Afterwards every block is loaded, with or without verification. *Wrong*: delivered with",
            "other bytes than were stored. *Lost*: acknowledged before the cut, and not there after it, which `none`",
            "permits. *Damaged*: found, and refused when it was loaded.",
            "",
            "| disk | file system | layout | durability | verify | cuts | acknowledged | whole | wrong | lost | "
            "damaged | slowest opening |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {cut['disk']} | {cut['file_system']} | {cut['layout']} | {cut['durability']} | "
            f"{'yes' if cut['verify'] else 'no'} | {cut['cuts']} | {cut['acknowledged']} | {cut['whole']} | "
            f"{cut['wrong']} | {cut['lost']} | "
            f"{cut['damaged']} | {cut['slowest_recovery_ms']:.1f} ms |"
            for cut in results["cuts"]
        ]
        kinds: Counter[str] = sum((Counter(cut["kinds"]) for cut in results["cuts"]), Counter())
        if kinds:
            counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            lines += ["", f"What the recorded disks kept of the writes since their last flush: {counts}."]
    if results["kills"]:
        roomy, tight = results["kills"]["roomy"], results["kills"]["tight"]
        lines += [
            "",
            "## Kills",
            f"{roomy['rounds'] + tight['rounds']} writers, each killed (SIGKILL) within 250 ms, those of a row in one",
            "directory. After each, the store is opened, and the last 64 blocks that were acknowledged are loaded.",
            "Where nothing has to be evicted, none may be missing.",
            "",
            "| | kills | acknowledged | whole | wrong | missing | slowest opening | most files | most bytes |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {kill['rounds']} | {kill['acknowledged']} | {kill['whole']} | {kill['wrong']} | "
            f"{kill['missing']} | {kill['slowest_recovery_ms']:.1f} ms | {kill['most_files']} | "
            f"{kill['most_bytes'] / (1 << 20):.0f} of "
            f"{kill['capacity'] / (1 << 20):.0f} MiB |"
            for name, kill in (("room for all", roomy), ("eviction all the time", tight))
        ]
    if results["soak"]:
        soak, all_of = results["soak"], results["soak"]["all"]
        lines += [
            "",
            "## Soak",
            f"{soak['processes']} processes for {soak['seconds']} s on one store with a far tier; {soak['killed']}",
            f"were killed and replaced, {soak['flipped']} bits of files of each tier were flipped, and of each one of",
            f"{soak['fault_one_in']} reads and writes failed, fell short, was late, changed or lost.",
            f"{all_of['stored']} shards were stored and {all_of['delivered']} blocks delivered, {all_of['from_far']}",
            f"of them from the far tier, {all_of['wrong']} of them wrong; {all_of['corrupt']} refused as damaged,",
            f"{all_of['failed']} failed, {all_of['dropped_no_room']} shards dropped for want of room and",
            f"{all_of['dropped']} otherwise, {all_of['evicted']} blocks evicted. {all_of['far_written']} blocks were",
            f"written to the far tier and {all_of['promoted']} promoted from it; it was given up and opened again",
            f"{all_of['outages']} times. At most {soak['most_bytes'] / (1 << 20):.1f} MiB of",
            f"{soak['capacity'] / (1 << 20):.0f} MiB were taken, and {soak['most_far_bytes'] / (1 << 20):.1f} MiB of",
            f"{soak['capacity'] / (1 << 19):.0f} MiB of the far tier, in {soak['samples']} looks.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Exits with 1 if a block was wrong, or lost although it was synced."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--cuts", type=int, default=50, help="by clones, in each row of the table")
    parser.add_argument("--recorded-cuts", type=int, default=42, help="by recorded writes, in each row")
    parser.add_argument("--file-systems", nargs="+", default=["ext4", "xfs"])
    parser.add_argument("--layouts", nargs="+", default=["segments", "files"])
    parser.add_argument("--durabilities", nargs="+", default=["sync", "batched", "none"])
    parser.add_argument("--capacity", type=int, default=2 << 30)
    parser.add_argument("--block-bytes", type=int, default=128 << 10)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=600, help="of the soak")
    parser.add_argument("--seed", default="hoistway")
    parser.add_argument("--note", help="what else there is to say, such as what ran beside it")
    parser.add_argument("--directory", type=Path, default=Path("target/torture"))
    parser.add_argument(
        "--output", type=Path, help="where to write the results as Markdown, and as JSON beside it"
    )
    arguments = parser.parse_args()
    arguments.program = arguments.program.resolve()
    results: dict[str, Any] = {
        "host": machine(Path(), ()),
        "note": arguments.note,
        "cuts": cut_power(arguments),
        "kills": kill(arguments) if arguments.kills else None,
        "soak": run(arguments, "soak", "--seconds", arguments.seconds) if arguments.seconds else None,
    }
    text = table(results)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
        arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    if any(cut["wrong"] or (cut["durability"] != "none" and cut["lost"]) for cut in results["cuts"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
