"""From one configuration value to an executor class."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from treadle.codegen.bundle import is_bundle, open_bundle
from treadle.ir.errors import ConfigError
from treadle.runtime.config import EngineConfig
from treadle.runtime.executor.interface import Executor

EXECUTORS = {
    "uni": "treadle.runtime.executor.uni:UniExecutor",
    "mp": "treadle.runtime.executor.multi_process:MultiProcessExecutor",
}

PLANNED = ("ray", "external_launcher")
"""Names that are known and that this version refuses."""


def chosen_executor(config: EngineConfig) -> Any:
    """What `config.executor` asks for; "auto" is "mp" for a bundle that is cut over ranks, otherwise "uni"."""
    if config.executor != "auto":
        return config.executor
    is_cut = is_bundle(config.bundle) and open_bundle(config.bundle, for_loading=False).manifest.num_ranks > 1
    return "mp" if is_cut else "uni"


def select_executor(asked: Any) -> type[Executor]:
    """The class for a name, a class, or a qualified name ("module:Class" or "module.Class").

    Raises TypeError for a class that is no Executor, ConfigError (a ValueError) for anything else that fits nothing.
    """
    if isinstance(asked, str):
        asked = _resolve(asked)
    if not isinstance(asked, type):
        raise ConfigError(f"executor={asked!r} should be one of {_choices()}, an Executor class, or 'module:Class'")
    if not issubclass(asked, Executor):
        raise TypeError(f"executor class {asked.__module__}.{asked.__qualname__} is not a subclass of Executor")
    return asked


def _resolve(name: str) -> Any:
    if name in PLANNED:
        raise ConfigError(f"executor {name!r} is not available in this version; choose one of {_choices()}")
    target = EXECUTORS.get(name, name)
    module, _, attribute = target.partition(":") if ":" in target else target.rpartition(".")
    if not module:
        raise ConfigError(f"unknown executor {name!r}; choose one of {_choices()}, or name a class as 'module:Class'")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"executor {name!r} cannot be loaded: {error}") from error


def _choices() -> str:
    return ", ".join(EXECUTORS)
