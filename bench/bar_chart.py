"""Bar charts for README: a bar for each package, legible on a phone, by day and by night."""

from __future__ import annotations

from collections.abc import Mapping

# A phone shows some 370 of these units.
WIDTH, ROW_HEIGHT, BAR_HEIGHT, TOP, BOTTOM = 400, 44, 14, 30, 24
# Beside the longest bar, for its number.
NUMBER_WIDTH = 50
STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #24292f }
    .quiet { fill: #57606a }
    .ours { fill: #1f6feb }
    .peer { fill: #8b949e }
    line { stroke: #57606a; stroke-dasharray: 3 3 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      .quiet { fill: #9da7b1 }
      .ours { fill: #4493f8 }
      .peer { fill: #6e7681 }
      line { stroke: #9da7b1 }
    }
"""


def drawn(title: str, rates: Mapping[str, float], limit: tuple[str, float]) -> str:
    """An SVG of GB/s by package, ours first, with a line at a limit and its name."""
    named, limit_rate = limit
    height = TOP + ROW_HEIGHT * len(rates) + BOTTOM
    scale = (WIDTH - NUMBER_WIDTH) / max(*rates.values(), limit_rate)
    end = limit_rate * scale
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="bar-chart" role="img"'
        f' width="560" height="{height * 560 // WIDTH}" viewBox="0 0 {WIDTH} {height}">',
        f"  <title>{title}</title>",
        f"  <style>{STYLE}  </style>",
        f'  <text y="16">{title}</text>',
        f'  <line x1="{end:.0f}" x2="{end:.0f}" y1="{TOP}" y2="{height - BOTTOM}"/>',
        f'  <text class="quiet" x="{end:.0f}" y="{height - 6}" text-anchor="end">{named}: {limit_rate:.2f}</text>',
    ]
    for row, (package, rate) in enumerate(rates.items()):
        top = TOP + ROW_HEIGHT * row
        kind = "peer" if row else "ours"
        lines += [
            f'  <text y="{top + 16}">{package}</text>',
            f'  <rect class="{kind}" y="{top + 22}" width="{rate * scale:.0f}" height="{BAR_HEIGHT}" rx="2"/>',
            f'  <text x="{max(rate, limit_rate) * scale + 6:.0f}" y="{top + 34}">{rate:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
