"""Entry point: `python3 bench/gpu/run.py --help`."""

import sys
from pathlib import Path

# The harness of the host benchmark is imported by the names of its modules, this folder as the package `gpu`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

try:
    from gpu.suite import main
except ModuleNotFoundError as error:
    sys.exit(
        f"the suite needs {error.name} in this Python ({sys.executable}); torch with CUDA for most checks"
    )

if __name__ == "__main__":
    sys.exit(main())
