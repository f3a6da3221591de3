"""Loads a checkpoint by URLs of every kind: `python bench/demo_objects.py DIRECTORY OBJECTD`.

Each server is the program of testkit/objectd, which has the files of the directory. The command loads them,
compares the tensors with digests of the files in the directory, and names the routes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

# The dialect of the server, the prefix of its objects, the URL of the folder, and the end of the endpoint.
SCHEMES = {
    "s3": ("s3", "models/", "s3://models/", ""),
    "gs": ("google", "models/", "gs://models/", ""),
    "az": ("azure", "account/models/", "az://models/", "/account"),
    "http": ("s3", "models/", "{server}/models/", ""),
    "hf": ("hub", "", "hf://org/model", ""),
}


def hoistway(*arguments: object) -> str:
    """Runs the command."""
    command = [sys.executable, "-m", "hoistway", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[2:])} failed:\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Loads by each scheme."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("objectd", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "manifest.json"
        hoistway("verify", arguments.directory, "--save", manifest)
        for scheme, (dialect, prefix, url, end) in SCHEMES.items():
            with subprocess.Popen(
                [arguments.objectd, arguments.directory, prefix, "0", dialect],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as server:
                assert server.stdin is not None
                assert server.stdout is not None
                endpoint = server.stdout.readline().strip()
                shown = url.format(server=endpoint)
                store = ["--store", f"endpoint={endpoint}{end}", "--store", "anonymous=true"]
                report = hoistway("load", shown, *store, "--report", "--manifest", manifest)
                server.stdin.close()
            said = ("  http", "  checksums", "  verified")
            lines = [line for line in report.splitlines() if line.startswith(said)]
            print(f"{scheme}: {shown}", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
