"""A table of names to import paths, loaded on first use. Every extension point of treadle is one of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from treadle.ir.errors import ConfigError


class Registry:
    """Literal table `name -> "module:attribute"`; rejects duplicates and lists the known names in its error."""

    def __init__(self, kind: str, table: Mapping[str, str]):
        self.kind = kind
        self._targets = dict(table)
        self._loaded: dict[str, Any] = {}

    def register(self, name: str, target: str | Any) -> None:
        """Adds one row; `target` is an import path or the object itself. Raises ConfigError for a taken name."""
        if name in self._targets:
            raise ConfigError(f"{self.kind} {name!r} is already registered as {self._targets[name]}; choose another name")
        if isinstance(target, str):
            self._targets[name] = target
        else:
            self._targets[name] = f"{type(target).__module__}:{name}"
            self._loaded[name] = target

    def get(self, name: str) -> Any:
        """Returns the object behind `name`. Raises ConfigError that lists the choices for an unknown one."""
        if name not in self._targets:
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of: {', '.join(sorted(self._targets))}")
        if name not in self._loaded:
            module, _, attribute = self._targets[name].partition(":")
            self._loaded[name] = getattr(import_module(module), attribute)
        return self._loaded[name]

    def names(self) -> list[str]:
        """The names in the order they were registered; for attention backends this is the order of preference."""
        return list(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)
