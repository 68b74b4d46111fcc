"""Rewrites string lengths of a JSON schema as patterns, for xgrammar: its own form of them lets control characters through,
which JSON does not allow, and bytes that are no UTF-8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHARACTERS = "[ !#-\\[\\]-\ud7ff\ue000-\uffff\U00010000-\U0010ffff]"
"""What stands for itself in a JSON string: all but control characters, the quote and the backslash."""

_VALUES = ("enum", "const", "default", "examples")
_MAPS = ("properties", "$defs", "definitions")


def with_exact_lengths(schema: Any) -> Any:
    """A copy in which `minLength` and `maxLength` beside type string are a `pattern` of as many characters."""
    if isinstance(schema, list):
        return [with_exact_lengths(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            copy[key] = {name: with_exact_lengths(inner) for name, inner in value.items()}
        else:
            copy[key] = value if key in _VALUES else with_exact_lengths(value)
    if schema.get("type") == "string" and ("minLength" in schema or "maxLength" in schema):
        low, high = copy.pop("minLength", 0), copy.pop("maxLength", "")
        copy["pattern"] = f"^{CHARACTERS}{{{low},{high}}}$"
    return copy
