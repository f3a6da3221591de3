"""``python -m hoistway`` is the command ``hoistway``."""

import sys

from hoistway._command import main

if __name__ == "__main__":
    sys.exit(main())
