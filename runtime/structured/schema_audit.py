"""What of a JSON schema a backend would ignore in silence: found before compiling, named by keyword and place.

Source of the vocabulary: JSON Schema drafts 7 and 2020-12, core and validation. Keywords outside of it are annotations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Any

_SUBSCHEMA = ("additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_SUBSCHEMA += ("unevaluatedItems", "unevaluatedProperties", "contentSchema")
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_LOOK_AROUND = re.compile(r"(?:^|[^\\])(?:\\\\)*(\(\?(?:[=!]|<[=!]))")
_WIDE_CLASS = re.compile(r"(?:^|[^\\])(?:\\\\)*(\[\^|\.|\\[SWDpP])")
_BACK_REFERENCE = re.compile(r"(?:^|[^\\])(?:\\\\)*\\(?:[1-9]|k<|b|B)")


def walk(schema: Schema, place: str = "$") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (place, subschema) of every subschema that is an object; `place` reads like `$.properties.a`."""
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key in _SUBSCHEMA:
        if key in schema:
            yield from walk(schema[key], f"{place}.{key}")
    for key in _SUBSCHEMA_LISTS:
        if isinstance(schema.get(key), list):
            for index, inner in enumerate(schema[key]):
                yield from walk(inner, f"{place}.{key}[{index}]")
    for key in _SUBSCHEMA_MAPS:
        if isinstance(schema.get(key), Mapping):
            for name, inner in schema[key].items():
                yield from walk(inner, f"{place}.{key}.{name}")


def patterns(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yields (keyword and place, regular expression) of every pattern in a schema."""
    for place, inner in walk(schema):
        if isinstance(inner.get("pattern"), str):
            yield f"keyword 'pattern' at {place}", inner["pattern"]
        if isinstance(inner.get("patternProperties"), Mapping):
            for pattern in inner["patternProperties"]:
                yield f"keyword 'patternProperties' at {place}", pattern


def regular_language_reason(pattern: str) -> str | None:
    """Why a regular expression is not one in the strict sense, which a grammar needs; None if it seems to be."""
    if found := _LOOK_AROUND.search(pattern):
        return f"look-around {found[1]!r} is not supported"
    if _BACK_REFERENCE.search(pattern):
        return "back references and word boundaries are not supported"
    return None


def inexact_classes_reason(pattern: str) -> str | None:
    """Which character class of a pattern xgrammar does not hold exactly: it takes bytes that are no UTF-8 for characters."""
    if found := _WIDE_CLASS.search(pattern):
        return f"{found[1]!r} is not held exactly"
    return None


def ignored_by_xgrammar(schema: Schema) -> str | None:
    """The first keyword that xgrammar would compile without holding it, with its place and what is wrong; None if none."""
    for place, inner in walk(schema):
        for keyword, check in _XGRAMMAR_CHECKS.items():
            if keyword in inner and (reason := _reason(check, inner)):
                return f"keyword {keyword!r} at {place}: {reason}"
    return None


def _reason(check: Any, schema: Mapping[str, Any]) -> str | None:
    try:
        return check(schema)
    except (TypeError, AttributeError, KeyError):
        return "its value has another shape than JSON Schema gives it"


_VALIDATING = {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("uniqueItems", "contains", "minContains", "maxContains", "minLength", "maxLength", "pattern", "format", "minimum"),
    *("maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf", "oneOf", "allOf", "not", "if", "then"),
    *("else", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "$ref"),
}


def _never(_: Mapping[str, Any]) -> str:
    return "it is not supported"


def _alone(keyword: str, allowed: frozenset[str] = frozenset()) -> Any:
    """A check that no other validating keyword stands beside `keyword`: one of the two would be ignored."""

    def check(schema: Mapping[str, Any]) -> str | None:
        beside = sorted((_VALIDATING & schema.keys()) - {keyword} - allowed)
        return f"it is not supported beside {', '.join(beside)}" if beside else None

    return check


def _pattern(schema: Mapping[str, Any]) -> str | None:
    beside = sorted({"minLength", "maxLength", "format"} & schema.keys())
    if beside:
        return f"it is not supported beside {', '.join(beside)}"
    pattern = schema["pattern"]
    if not isinstance(pattern, str):
        return "it should be a string"
    return regular_language_reason(pattern) or inexact_classes_reason(pattern)


def _length(schema: Mapping[str, Any]) -> str | None:
    return None if schema.get("type") == "string" else "it is supported beside type string only"


def _required(schema: Mapping[str, Any]) -> str | None:
    missing = [name for name in schema["required"] if name not in schema.get("properties", {})]
    return f"properties has no {missing[0]!r}" if missing else None


def _reference(schema: Mapping[str, Any]) -> str | None:
    if not str(schema["$ref"]).startswith("#"):
        return "only references within the schema are supported"
    return _alone("$ref")(schema)


def _unique(schema: Mapping[str, Any]) -> str | None:
    return "it is not supported" if schema["uniqueItems"] is not False else None


def _all_of(schema: Mapping[str, Any]) -> str | None:
    if len(schema["allOf"]) != 1:
        return "more than one schema is not supported"
    return _alone("allOf")(schema)


def _one_of(schema: Mapping[str, Any]) -> str | None:
    branches = schema["oneOf"]
    if not _disjoint(branches):
        return "branches that may overlap are not supported"
    return _alone("oneOf")(schema)


def _disjoint(branches: list[Any]) -> bool:
    """Whether no value can match two branches: their types differ, or a required property holds other constants in each."""
    if not all(isinstance(branch, Mapping) for branch in branches):
        return False
    types = [branch.get("type") for branch in branches]
    kinds = ["number" if kind == "integer" else kind for kind in types]
    if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
        return True
    common = set.intersection(*(set(branch.get("required", ())) for branch in branches)) if branches else set()
    for name in sorted(common):
        values = [_constants(branch.get("properties", {}).get(name)) for branch in branches]
        every = [value for group in values if group for value in group]
        if all(values) and len(set(every)) == len(every):
            return True
    return False


def _constants(schema: Any) -> list[str] | None:
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [json.dumps(schema["const"], sort_keys=True)]
    if isinstance(schema.get("enum"), list):
        return [json.dumps(value, sort_keys=True) for value in schema["enum"]]
    return None


def _bound(keyword: str) -> Any:
    def check(schema: Mapping[str, Any]) -> str | None:
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "it should be a number"
        kind = schema.get("type")
        if kind == "integer" and abs(value) < 2**53:
            return None
        if kind == "number" and abs(value) < 1e15:
            return None
        return "it is supported beside type integer or number only"

    return check


def _listed_items(schema: Mapping[str, Any]) -> str | None:
    return "a list of schemas is not supported, use prefixItems" if isinstance(schema["items"], list) else None


_FORMATS = {"date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri"}


def _format(schema: Mapping[str, Any]) -> str | None:
    if schema["format"] not in _FORMATS:
        return f"format {schema['format']!r} is not supported"
    beside = sorted({"minLength", "maxLength", "pattern"} & schema.keys())
    return f"it is not supported beside {', '.join(beside)}" if beside else None


_XGRAMMAR_CHECKS = {
    **{
        keyword: _never
        for keyword in (
            *("multipleOf", "contains", "minContains", "maxContains", "not", "if", "then", "else", "dependentRequired"),
            *("dependentSchemas", "dependencies", "additionalItems", "unevaluatedItems", "unevaluatedProperties"),
            *("patternProperties", "propertyNames", "minProperties", "maxProperties", "$dynamicRef", "$recursiveRef"),
        )
    },
    "uniqueItems": _unique,
    "pattern": _pattern,
    "format": _format,
    "minLength": _length,
    "maxLength": _length,
    "required": _required,
    "$ref": _reference,
    "allOf": _all_of,
    "oneOf": _one_of,
    "anyOf": _alone("anyOf"),
    "enum": _alone("enum", frozenset({"type"})),
    "const": _alone("const", frozenset({"type"})),
    "items": _listed_items,
    **{keyword: _bound(keyword) for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
}
