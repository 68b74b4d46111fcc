"""Settings given as NAME=VALUE on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from treadle.ir.errors import ConfigError


def parse_settings(given: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """NAME=VALUE pairs; values are read as JSON where they are JSON, else as text. Raises ConfigError without a '='."""
    table: dict[str, Any] = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"{flag} {pair!r} should be NAME=VALUE")
        try:
            table[name] = json.loads(value)
        except json.JSONDecodeError:
            table[name] = value
        if isinstance(table[name], list):
            table[name] = tuple(table[name])
    return table
