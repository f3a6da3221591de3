"""Charts, drawn by `hoistway bench chart`: the harness and the command have one look."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

COMMAND = Path(__file__).resolve().parent.parent / "target" / "release" / "hoistway"
OURS, PEER = 0, 1


def draw(path: Path, title: str, columns: int, scale: str, panels: list[dict[str, Any]]) -> None:
    """Writes an SVG. The types of `crates/hoistway-cli/src/charts` say what a panel has."""
    if not COMMAND.exists():
        raise SystemExit(f"{COMMAND} is missing: cargo build --release --package hoistway-cli")
    figure = {"title": title, "columns": columns, "scale": scale, "panels": panels}
    subprocess.run([COMMAND, "bench", "chart", path], input=json.dumps(figure), text=True, check=True)
