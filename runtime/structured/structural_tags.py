"""Structural tags: free text in which a trigger starts a constrained part. Reads the forms that callers use.

The format is xgrammar's (`{"type": "structural_tag", "format": {...}}`); the older form with `structures` and `triggers`
is the same as its `triggered_tags`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from treadle.runtime.structured.constraint import GrammarError


def read_structural_tag(source: str) -> dict[str, Any]:
    """A structural tag in the present form. Raises GrammarError for anything else."""
    tag = json.loads(source)
    if "structures" in tag:
        structures, triggers = tag["structures"], tag.get("triggers")
        if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
            raise GrammarError("structural_tag needs a list of structures and a list of triggers, neither empty")
        tags = [_tag(structure) for structure in structures]
        return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
    if not isinstance(tag.get("format"), dict):
        raise GrammarError('structural_tag needs a "format", or "structures" and "triggers"')
    return {**tag, "type": "structural_tag"}


def _tag(structure: Any) -> dict[str, Any]:
    names = ("begin", "schema", "end")
    if not isinstance(structure, dict) or any(name not in structure for name in names):
        raise GrammarError(f"structural_tag has a structure without {', '.join(names)}")
    content = {"type": "json_schema", "json_schema": structure["schema"]}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}


def parts(node: Any, place: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, format) of every format within a format, but not what lies inside schemas."""
    if isinstance(node, list):
        for index, inner in enumerate(node):
            yield from parts(inner, f"{place}[{index}]")
    elif isinstance(node, dict):
        if "type" in node:
            yield place, node
        for key, inner in node.items():
            if key != "json_schema":
                yield from parts(inner, f"{place}.{key}")
