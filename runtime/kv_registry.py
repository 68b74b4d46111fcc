"""Which manager serves which kind of KV-cache spec: by class, through the spec's ancestors, or by role.

A new kind registers what differs and nothing else; a subclass of a known spec inherits its parent's manager.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from treadle.ir.errors import ConfigError
from treadle.runtime.kv_specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


class SpecRegistry:
    """Spec class -> role, and role -> manager class (or "module:attribute", loaded on first use)."""

    def __init__(self) -> None:
        self._roles: dict[type[KVCacheSpec], str] = {}
        self._managers: dict[str, str | type] = {}

    def register(self, spec_class: type[KVCacheSpec], role: str, manager: str | type | None = None) -> None:
        """Adds a spec class; `manager` may be left out for a role that has one. Raises ConfigError for duplicates."""
        if spec_class in self._roles:
            raise ConfigError(f"KV spec {spec_class.__name__} is registered already, as {self._roles[spec_class]!r}")
        if manager is not None and role in self._managers:
            raise ConfigError(f"KV-cache role {role!r} has a manager already: {self._managers[role]}")
        if manager is None and role not in self._managers:
            raise ConfigError(f"KV-cache role {role!r} needs a manager; known roles: {', '.join(self._managers)}")
        self._roles[spec_class] = role
        if manager is not None:
            self._managers[role] = manager

    def manager_for(self, spec_class: type[KVCacheSpec]) -> Any:
        """Returns the manager class of the nearest registered ancestor. Raises ConfigError if there is none."""
        for ancestor in spec_class.__mro__:
            if ancestor in self._roles:
                return self.manager_for_role(self._roles[ancestor])
        known = ", ".join(c.__name__ for c in self._roles)
        raise ConfigError(f"no cache manager for KV spec {spec_class.__name__}; derive it from or register it beside: {known}")

    def manager_for_role(self, role: str) -> Any:
        """Returns the manager class of a role. Raises ConfigError that lists the roles for an unknown one."""
        if role not in self._managers:
            raise ConfigError(f"unknown KV-cache role {role!r}; choose one of: {', '.join(self._managers)}")
        manager = self._managers[role]
        if isinstance(manager, str):
            module, _, attribute = manager.partition(":")
            manager = self._managers[role] = getattr(import_module(module), attribute)
        return manager

    def check(self, specs: Mapping[int, KVCacheSpec]) -> None:
        """Raises ConfigError naming the layer and the class unless every layer's spec has a manager."""
        for layer, spec in specs.items():
            try:
                self.manager_for(type(spec))
            except ConfigError as error:
                raise ConfigError(f"layer {layer}: {error}") from error


KV_SPECS = SpecRegistry()
KV_SPECS.register(FullAttentionSpec, "full_attention", "treadle.runtime.scheduler.group_manager:FullAttentionManager")
KV_SPECS.register(SlidingWindowSpec, "sliding_window", "treadle.runtime.scheduler.group_manager:SlidingWindowManager")
