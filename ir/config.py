"""Configuration: frozen dataclasses whose fields say what they are for, and one function that resolves them.

A field's role is KEY (changes generated code, part of the artifact key), RUNTIME (does not) or SECRET (never
printed, stored or hashed). `resolve` keeps where each value came from.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from treadle.ir.errors import ConfigError

C = TypeVar("C")


class Role(Enum):
    KEY = "key"
    RUNTIME = "runtime"
    SECRET = "secret"


KEY, RUNTIME, SECRET = Role.KEY, Role.RUNTIME, Role.SECRET


def option(
    default: Any = dataclasses.MISSING, *, role: Role, doc: str, choices: Sequence[Any] | None = None, factory: Any = None
) -> Any:
    """A documented field of a configuration dataclass. `choices` lists the valid values, if they are few."""
    metadata = {"role": role, "doc": doc, "choices": tuple(choices) if choices else None}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Origin:
    """Where an effective value came from: user, level, platform, bundle or default; with the reason if lowered."""

    source: str
    asked: Any = None
    reason: str = ""


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """An effective configuration and, for each field, its origin.

    `asked` is what the user set, `defaults` what every field would be had the user set nothing.
    """

    config: C
    origins: Mapping[str, Origin]
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def override(self, source: str, reason: str = "", **changes: Any) -> Resolved[C]:
        """Returns a copy with some fields set by `source`; the value that was asked for is kept in the origin."""
        origins = dict(self.origins)
        for name in changes:
            origins[name] = Origin(source, getattr(self.config, name), reason)
        config = dataclasses.replace(self.config, **changes)  # type: ignore[type-var]
        return dataclasses.replace(self, config=config, origins=origins)

    def rows(self) -> list[dict[str, Any]]:
        """One row a field for printing: field, value, source, asked, reason. Secrets are shown as '***'."""
        rows = []
        for field in dataclasses.fields(self.config):  # type: ignore[arg-type]
            value, origin = getattr(self.config, field.name), self.origins[field.name]
            if field.metadata["role"] is SECRET:
                value = "***" if value else None
                origin = dataclasses.replace(origin, asked=None)
            rows.append({"field": field.name, "value": value, **dataclasses.asdict(origin)})
        return rows


def resolve(cls: type[C], asked: Mapping[str, Any], *layers: tuple[str, Mapping[str, Any]]) -> Resolved[C]:
    """Builds a `cls` from what the user asked for, then each `(source, defaults)` layer, then field defaults.

    Raises ConfigError for an unknown name, a value of the wrong type or one outside `choices`.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for source, given in (("user", asked), *layers):
        for name, value in given.items():
            if name not in fields:
                raise ConfigError(f"unknown setting {name!r}; {cls.__name__} has: {', '.join(sorted(fields))}")
            if name in values:
                continue
            values[name] = _checked(cls.__name__, fields[name], hints[name], value)
            origins[name] = Origin(source)
    missing = [n for n, f in fields.items() if n not in values and _has_no_default(f)]
    if missing:
        raise ConfigError(f"{cls.__name__} needs a value for: {', '.join(missing)}")
    for name in fields:
        origins.setdefault(name, Origin("default"))
    return Resolved(cls(**values), origins, dict(asked), _defaults(fields.values(), layers))


def _defaults(fields: Iterable[dataclasses.Field[Any]], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The value of every field that has one without the user: the first layer's, else the field's own."""
    found: dict[str, Any] = {}
    for field in fields:
        given = [layer[field.name] for _, layer in layers if field.name in layer]
        if given:
            found[field.name] = given[0]
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            found[field.name] = field.default
    return found


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _checked(owner: str, field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{owner}.{field.name}={value!r} is not one of: {', '.join(map(str, choices))}")
    if not fits(value, hint):
        raise ConfigError(f"{owner}.{field.name}={value!r} ({type(value).__name__}) should be {spell(hint)}")
    return value


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; containers are not looked into, and an int is a float but no bool is."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if hint is Any:
        return True
    if hint in (None, type(None)):
        return value is None
    if origin is typing.Literal:
        return value in args
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def spell(hint: Any) -> str:
    """An annotated type in words for a message."""
    return getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")  # type: ignore[return-value]
