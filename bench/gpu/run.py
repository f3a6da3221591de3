"""Entry point: `python3 bench/gpu/run.py --help`."""

import sys
from pathlib import Path

# The harness of the host benchmark is imported by the names of its modules, this folder as the package `gpu`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from gpu.suite import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
