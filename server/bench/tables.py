"""Results as lines for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.server.bench.summary import Summary

COLUMNS = ("mean", "median", "p90", "p95", "p99", "max")
_LABELS = {
    "seconds": "whole batch, s",
    "output_tokens_per_second": "output tokens/s",
    "total_tokens_per_second": "all tokens/s",
    "requests_per_second": "requests/s",
}


def summary_lines(table: Mapping[str, Summary]) -> list[str]:
    """A row for each summary, the columns above it; one without readings says so."""
    width = max(len(name) for name in table)
    lines = [f"{'':<{width}}" + "".join(f"{column:>12}" for column in COLUMNS)]
    for name, summary in table.items():
        cells = [f"{summary[column]:>12.3f}" for column in COLUMNS] if summary["count"] else ["   no readings"]
        lines.append(f"{name:<{width}}" + "".join(cells))
    return lines


def offline_lines(results: Mapping[str, Any]) -> list[str]:
    """What `latency` and `throughput` print."""
    table = {label: results[name] for name, label in _LABELS.items()}
    return summary_lines(table | {"first token, ms": results["ttft_ms"], "each next token, ms": results["tpot_ms"]})
