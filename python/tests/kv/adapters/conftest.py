"""The helpers of the plug-ins' tests are those of the adapters' too: both run on the sources of hosts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "plugins"))
