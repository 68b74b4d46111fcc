"""Seeded JSON schemas whose values are short whatever a model writes, so that every answer comes to its end."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = (r"^[a-c]{1,3}-\d{2}$", r"^(red|green)$", r"^[A-Z][a-z]{0,3}$", r"^\d{1,3}(\.\d)?$", r"^x+y?$|^z$", r"^[^a-z\s]{2}$")


def seeded_schema(seed: int) -> Schema:
    """An object of 1 to 4 properties, up to two levels deep, with references into `$defs`."""
    rng = random.Random(seed)
    schema = _object(rng, depth=2, most=4)
    schema["$defs"] = {"leaf": _leaf(rng, refs=False), "pair": _object(rng, depth=0, most=2, refs=False)}
    return schema


def _object(rng: random.Random, depth: int, most: int, refs: bool = True) -> Schema:
    names = [chr(ord("a") + index) for index in range(rng.randint(1, most))]
    properties = {name: _value(rng, depth, refs) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int, refs: bool) -> Schema:
    if depth and rng.random() < 0.25:
        return _object(rng, depth - 1, most=2, refs=refs)
    if depth and rng.random() < 0.25:
        low = rng.randint(0, 1)
        return {"type": "array", "items": _leaf(rng, refs), "minItems": low, "maxItems": low + rng.randint(0, 1)}
    return _leaf(rng, refs)


def _leaf(rng: random.Random, refs: bool) -> Schema:
    kinds = [_enum, _const, _integer, _number, _string, _pattern, _any_of, lambda _: {"type": "boolean"}, lambda _: {"type": "null"}]
    if refs:
        kinds += [lambda rng: {"$ref": f"#/$defs/{rng.choice(('leaf', 'pair'))}"}]
    return rng.choice(kinds)(rng)


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(["on", "o ff", 'q"', "\U0001f99c\u0e01", 3, -1.5, None, True, [1], {"k": "v"}], 3)}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice(["fixed", 7, None, "\u65e5"])}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    bounds = [{"minimum": low, "maximum": low + rng.randint(0, 120)}, {"exclusiveMinimum": low, "exclusiveMaximum": low + 9}]
    return {"type": "integer", **rng.choice(bounds)}


def _number(rng: random.Random) -> Schema:
    low = rng.choice([-2.5, 0, 0.25, 10])
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.5, 3, 100])}


def _string(rng: random.Random) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 2)}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _any_of(rng: random.Random) -> Schema:
    return {"anyOf": [rng.choice((_integer, _string))(rng), {"type": "null"}]}
