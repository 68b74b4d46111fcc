"""Numbers of many readings: mean, median, percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

PERCENTILES = (50, 90, 95, 99)

Summary = dict[str, float]


def summarise(values: Sequence[float], factor: float = 1.0) -> Summary:
    """Count, mean, least, most and percentiles of `values` times `factor`; only the count if there are none."""
    ordered = sorted(value * factor for value in values)
    if not ordered:
        return {"count": 0}
    named = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    found = {"mean": sum(ordered) / len(ordered), "median": named["p50"], "min": ordered[0], "max": ordered[-1], **named}
    return {"count": len(ordered)} | {name: round(value, 6) for name, value in found.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sorted values lie, drawn straight between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
