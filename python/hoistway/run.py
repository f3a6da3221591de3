"""Runs a program with hoistway in place of safetensors: ``hoistway run -- generate.py``.

The program, and the Python processes that it starts, use the drop-in `hoistway.compat.safetensors`. Their code does not
change. Options come from the environment, such as ``HOISTWAY_ROUTE=io_uring``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

HOOK = str(Path(__file__).parent / "_hook")

USAGE = """usage: hoistway run [--report] -- COMMAND [ARGUMENT ...]

Runs COMMAND with hoistway in place of safetensors. Examples:

    hoistway run -- generate.py
    hoistway run --report -- accelerate launch train.py

'python -m hoistway.run' is the same for a certain Python. That Python runs scripts. With --report, each process that
loads reports on standard error, when it ends, how much it loaded, how fast, and by which routes. HOISTWAY_ROUTE and so
on set the options of loads."""


def environment() -> dict[str, str]:
    """The variables that make Python processes use the drop-in, added to those of this process."""
    added = dict(os.environ, HOISTWAY_SAFETENSORS="1")
    before = added.get("PYTHONPATH")
    # An empty entry among others is the working directory.
    paths = [path for path in before.split(os.pathsep) if path != HOOK] if before else []
    added["PYTHONPATH"] = os.pathsep.join([HOOK, *paths])
    return added


def _isolating_flag(command: list[str]) -> str | None:
    """The flag by which the first Python in the command, as in ``env python -I``, does not import the hook."""
    is_python = re.compile(r"python[0-9.]*(\.exe)?").fullmatch
    start = next((at for at, word in enumerate(command) if is_python(os.path.basename(word))), len(command))
    words = iter(command[start + 1 :])
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return None
        for letter in word[1:]:
            if letter in "IES":
                return f"-{letter}"
            # What follows is the flag's own.
            if letter in "cm":
                return None
            if letter in "WX":
                if word.endswith(letter):
                    next(words, None)
                break
    return None


def _interpreter(program: str) -> list[str]:
    """The interpreter that the first line of a script names, with its flags."""
    path = shutil.which(program)
    if path is None:
        return []
    try:
        with open(path, "rb") as script:
            line = script.readline(4096)
    except OSError:
        return []
    return os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []


def main(arguments: list[str]) -> NoReturn:
    """Replaces this process by the program; does not return."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        raise SystemExit(0)
    variables = environment()
    if arguments[:1] == ["--report"]:
        variables["HOISTWAY_REPORT"] = "1"
        arguments = arguments[1:]
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if command is arguments and command and command[0].startswith("-"):
        print(f"hoistway.run: '{command[0]}' is no option\n\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    if not command:
        print(USAGE, file=sys.stderr)
        raise SystemExit(2)
    # Windows names scripts among programs, and starts none by its name.
    if command[0].endswith(".py") and (sys.platform == "win32" or shutil.which(command[0]) is None):
        command = [sys.executable, *command]
    if flag := _isolating_flag(_interpreter(command[0])) or _isolating_flag(command):
        print(
            f"hoistway.run: {flag} keeps Python from importing what replaces safetensors by hoistway, so the program "
            "uses safetensors: leave the flag out, or call install() of hoistway.compat.safetensors",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        _become(command, variables)
    except OSError as error:
        print(f"hoistway.run: '{command[0]}' cannot be run: {error.strerror}", file=sys.stderr)
        raise SystemExit(3 if isinstance(error, FileNotFoundError) else 5) from None


def _become(command: list[str], variables: dict[str, str]) -> NoReturn:
    if sys.platform == "win32":
        # No program takes the place of another there. Ctrl-C is for that one; this one waits for it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise SystemExit(subprocess.run(command, env=variables, check=False).returncode)
    # As in a program that Python did not start.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execvpe(command[0], command, variables)


if __name__ == "__main__":
    main(sys.argv[1:])
