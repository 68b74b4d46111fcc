"""What a request may be constrained to: vLLM's parameters, their checks at entry, and the form that backends compile.

Imports neither torch nor a grammar library.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from treadle.ir.errors import UserError

JSON, JSON_OBJECT, REGEX, CHOICE, GRAMMAR, STRUCTURAL_TAG = (
    "json",
    "json_object",
    "regex",
    "choice",
    "grammar",
    "structural_tag",
)
KINDS = (JSON, JSON_OBJECT, REGEX, CHOICE, GRAMMAR, STRUCTURAL_TAG)

_FIELD = "SamplingParams.structured_outputs"


class GrammarError(UserError):
    """A constraint that cannot be compiled: it is malformed, too large, too slow, or asks for what no backend can hold."""

    def __init__(self, message: str):
        super().__init__(message if _FIELD in message else f"{_FIELD}: {message}")


class GrammarTimeout(GrammarError):
    """A constraint that took too long to compile: another backend is not tried with it."""


class Constraint(NamedTuple):
    """One constraint in the form that is compiled and cached by.

    `source` is JSON text for `json` (the schema), `choice` (a list of strings) and `structural_tag`, a pattern for
    `regex`, EBNF for `grammar`, empty for `json_object`. `compact` leaves no whitespace around JSON's punctuation,
    `closed` gives objects only the properties that their schema names.
    """

    kind: str
    source: str
    compact: bool = False
    closed: bool = False
    whitespace_pattern: str | None = None


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an answer must be: exactly one of the first six, with vLLM's names.

    `json` is a JSON schema as text, dict or Pydantic model; `grammar` is EBNF in the notation of llama.cpp's GBNF;
    `structural_tag` is a structural tag as text or dict. The first is normalised to text. Construction raises
    UserError naming the field.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise _bad("needs exactly one of " + ", ".join(KINDS) + f", not {found}")
        if self.json is not None:
            self.json = _json_text(JSON, self.json)
        if self.structural_tag is not None:
            self.structural_tag = _json_text(STRUCTURAL_TAG, self.structural_tag)
        for field in (REGEX, GRAMMAR, "whitespace_pattern"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or not value):
                raise _bad(f"{field}={value!r} should be a string that is not empty")
        for flag in (JSON_OBJECT, "disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, flag) not in (None, True, False):
                raise _bad(f"{flag}={getattr(self, flag)!r} should be true or false")
        self._check_choice()

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        if not isinstance(self.choice, list | tuple) or not self.choice:
            raise _bad("choice should be a list of at least one string")
        for item in self.choice:
            if not isinstance(item, str) or not item:
                raise _bad(f"choice holds {item!r}; each should be a string that is not empty")
        self.choice = list(self.choice)

    @property
    def constraint(self) -> Constraint:
        """The constraint in the form that backends compile."""
        kind = next(kind for kind in KINDS if getattr(self, kind) not in (None, False))
        value = getattr(self, kind)
        source = "" if kind == JSON_OBJECT else json.dumps(value) if kind == CHOICE else value
        return Constraint(
            kind, source, self.disable_any_whitespace, self.disable_additional_properties, self.whitespace_pattern
        )


def check_limits(constraint: Constraint, max_bytes: int, max_depth: int) -> None:
    """Raises GrammarError for a source that is larger or nested deeper than the limits; linear in the source."""
    size = len(constraint.source)
    if size <= max_bytes:
        size = len(constraint.source.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise GrammarError(
            f"{constraint.kind} has {size} bytes; the limit is {max_bytes} bytes (structured_output_max_bytes)"
        )
    if constraint.kind in (JSON, STRUCTURAL_TAG) and (depth := _depth(constraint.source)) > max_depth:
        raise GrammarError(
            f"{constraint.kind} is nested {depth} levels deep; the limit is {max_depth} (structured_output_max_depth)"
        )


def _depth(text: str) -> int:
    """Deepest nesting of brackets outside strings, without recursion."""
    depth = deepest = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def _json_text(field: str, value: Any) -> str:
    """JSON text of a mapping, a Pydantic model or JSON text; the text must hold an object (a schema may be true or false)."""
    model_schema = getattr(value, "model_json_schema", None)
    value = model_schema() if model_schema is not None else value
    try:
        if not isinstance(value, str):
            if not isinstance(value, dict):
                raise _bad(f"{field} should be an object or JSON text, not {type(value).__name__}")
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
            value.encode()
            return value
        parsed = json.loads(value)
        value.encode()
    except RecursionError as error:
        raise _bad(f"{field} is nested too deeply to be read") from error
    except UnicodeEncodeError as error:
        raise _bad(f"{field} is not valid Unicode: it holds half of a surrogate pair") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise _bad(f"{field} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict) and not (field == JSON and isinstance(parsed, bool)):
        raise _bad(f"{field} should hold a JSON object, not {type(parsed).__name__}")
    return value


def _bad(message: str) -> GrammarError:
    return GrammarError(message)
