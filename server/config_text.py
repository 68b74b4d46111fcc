"""Settings as a table: what was asked for, what would hold otherwise, what holds, and why."""

from __future__ import annotations

from typing import Any

from treadle.ir.config import Resolved

_COLUMNS = ("setting", "asked for", "default", "effective", "from", "reason")
_NOT_ASKED = "-"


def config_text(resolved: Resolved[Any]) -> str:
    """One line a field under a line with the configuration's name. Secrets are starred."""
    table = [_COLUMNS, *(_row(resolved, row) for row in resolved.rows())]
    widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS) - 1)]
    lines = [type(resolved.config).__name__]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join(lines)


def _row(resolved: Resolved[Any], row: dict[str, Any]) -> tuple[str, ...]:
    name = row["field"]
    is_secret = row["value"] == "***"
    asked = _NOT_ASKED if name not in resolved.asked else "***" if is_secret else _text(resolved.asked[name])
    default = _text(resolved.defaults[name]) if name in resolved.defaults else _NOT_ASKED
    return (name, asked, default, _text(row["value"]), row["source"], row["reason"])


def _text(value: Any) -> str:
    """A value; None is what is decided later, by the machine or the request."""
    if value is None:
        return "automatic"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "none"
    return str(value)
