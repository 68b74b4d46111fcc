"""A table of names to import paths, loaded on first use. Every extension point of treadle is one of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from treadle.ir.errors import ConfigError
from treadle.ir.plugins import Plugin, check_clashes, plugins


class Registry:
    """Literal table `name -> "module:attribute"`; rejects duplicates and lists the known names in its error.

    With `group`, other packages add rows through entry points of that name, `prefix` cut off. They are looked up when
    a name is asked for that is not in the table, or all names are, and come after the table's own.
    """

    def __init__(self, kind: str, table: Mapping[str, str], *, group: str | None = None, prefix: str = ""):
        self.kind = kind
        self.group = group
        self._prefix = prefix
        self._targets = dict(table)
        self._loaded: dict[str, Any] = {}

    def register(self, name: str, target: str | Any) -> None:
        """Adds one row; `target` is an import path or the object itself. Raises ConfigError for a taken name."""
        if name in self._targets:
            raise ConfigError(f"{self.kind} {name!r} is already registered as {self._targets[name]}; choose another name")
        if isinstance(target, str):
            self._targets[name] = target
        else:
            self._targets[name] = f"{getattr(target, '__module__', type(target).__module__)}:{name}"
            self._loaded[name] = target

    def get(self, name: str) -> Any:
        """The object behind `name`.

        Raises ConfigError that lists the choices for an unknown name, PluginError for a plugin that does not load.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name in self._targets:
            module, _, attribute = self._targets[name].partition(":")
            self._loaded[name] = getattr(import_module(module), attribute)
        elif plugin := self.plugins().get(name):
            self._loaded[name] = plugin.load()
        else:
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of: {', '.join(sorted(self.names()))}")
        return self._loaded[name]

    def names(self) -> list[str]:
        """The table's names in order, for attention backends the order of preference; then those of plugins, sorted.

        Raises PluginError for a plugin that has the name of a row of the table.
        """
        return [*self._targets, *sorted(self.plugins())]

    def plugins(self) -> dict[str, Plugin]:
        """The rows that other packages add, by name."""
        if self.group is None:
            return {}
        check_clashes(self.group, self._prefix, self.kind, self._targets)
        found = plugins(self.group).items()
        return {name.removeprefix(self._prefix): item for name, item in found if name.startswith(self._prefix)}

    def plugin(self, name: str) -> Plugin | None:
        """The plugin that `name` comes from; None for a row of the table."""
        return None if name in self._targets else self.plugins().get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self.plugins()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
