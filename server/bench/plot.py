"""The share of requests that were at most so slow, as one SVG file; needs no drawing library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from treadle.server.bench.http_stream import Timed
from treadle.server.bench.measures import latencies

_WIDTH, _HEIGHT, _PANEL, _LEFT, _TOP = 340, 220, 380, 50, 40
_PANELS = {"ttft": "time to first token, ms", "tpot": "time per output token, ms", "e2e": "end to end, ms"}


def plot_svg(requests: Sequence[Timed], title: str) -> str:
    """A panel each for ttft, tpot and e2e of the requests that ended well."""
    each = [latencies(timed) for timed in requests if timed.error is None]
    panels = [_panel(index, label, sorted(one[name] for one in each if name in one)) for index, (name, label) in enumerate(_PANELS.items())]
    size = f'width="{_PANEL * len(_PANELS) + 20}" height="{_HEIGHT + 100}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', f'<text x="{_LEFT}" y="20">{escape(title)}</text>', *panels, "</svg>\n"])


def _panel(index: int, label: str, ordered: Sequence[float]) -> str:
    top = ordered[-1] if ordered else 1.0
    points = " ".join(
        f"{_WIDTH * value / (top or 1.0):.1f},{_HEIGHT * (1 - (place + 1) / len(ordered)):.1f}" for place, value in enumerate(ordered)
    )
    marks = [f'<text x="-8" y="{_HEIGHT * (1 - share) + 4:.0f}" text-anchor="end">{share:.0%}</text>' for share in (0, 0.5, 1)]
    marks += [f'<text x="{_WIDTH * part}" y="{_HEIGHT + 18}" text-anchor="middle">{top * part:.4g}</text>' for part in (0, 0.5, 1)]
    return (
        f'<g transform="translate({index * _PANEL + _LEFT},{_TOP})">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>'
        f'<polyline points="{points}" fill="none" stroke="#06c" stroke-width="2"/>'
        f'{"".join(marks)}<text x="{_WIDTH / 2}" y="{_HEIGHT + 40}" text-anchor="middle">{escape(label)}</text></g>'
    )
