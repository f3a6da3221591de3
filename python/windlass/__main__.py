"""``python -m windlass`` is the command ``windlass``."""

import sys

from windlass._command import main

if __name__ == "__main__":
    sys.exit(main())
