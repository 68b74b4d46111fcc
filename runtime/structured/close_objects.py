"""Gives objects of a JSON schema only the properties that the schema names, as strict schemas ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "if", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")


def close_objects(schema: Any, *, everywhere: bool = False) -> Any:
    """A copy in which each object with `properties` has `additionalProperties: false`, unless it says otherwise.

    Objects that are combined with other schemas stay as they are: closed, each would exclude the others' properties.
    With `everywhere` also an object that says nothing about its properties is closed.
    """
    return _close(schema, everywhere, combined=False)


def _close(schema: Any, everywhere: bool, combined: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _inner(key, value, everywhere) for key, value in schema.items()}
    names = "properties" in schema or (everywhere and schema.get("type") == "object")
    if names and not combined and not any(key in schema for key in (*_OPEN, *_COMBINED)):
        closed["additionalProperties"] = False
    return closed


def _inner(key: str, value: Any, everywhere: bool) -> Any:
    if key in _VALUES:
        return value
    if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas") and isinstance(value, Mapping):
        return {name: _close(inner, everywhere, False) for name, inner in value.items()}
    if isinstance(value, list):
        return [_close(item, everywhere, key == "allOf") for item in value]
    return _close(value, everywhere, key in ("not", "if", "then", "else"))
