"""What other packages add, found through their entry points: passes, ops, kernels, backends, adapters, schemes.

Nothing is looked up before a name is asked for that treadle does not have itself, and a plugin's code is imported only
when it is used by name or listed, so that what is installed but unused costs and breaks nothing. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treadle.ir.errors import PluginError

GROUPS = {
    "treadle.passes": "a subclass of Pass, under the pass's name",
    "treadle.ops": "a reference decorated with `op`, under the op's name",
    "treadle.kernels": "an attention backend as attention.NAME, a NativeSource as native.NAME",
    "treadle.codegen_backends": "a code generator for pieces, under its name",
    "treadle.artifact_formats": "a loader of a backend's artifacts, under the format's name",
    "treadle.model_adapters": "a function that prepares a model for tracing, under the architecture's name",
    "treadle.quantization_schemes": "a quantization scheme, under its name",
    "treadle.structured_backends": "a backend of structured output, under its name",
    "treadle.tool_parsers": "a ToolFormat, under the parser's name",
    "treadle.reasoning_parsers": "a ReasoningFormat, under the parser's name",
}
"""Every entry-point group that treadle looks into, and what its entries are."""

_NOT_SOURCE = ("__pycache__",)


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed distribution. `target` is `module:attribute`."""

    group: str
    name: str
    target: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"entry point {self.name!r} ({self.target}) in group {self.group} of {self.distribution} {self.version}"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def load(self) -> Any:
        """The object behind the entry point. Raises PluginError naming the distribution and the entry point."""
        try:
            return EntryPoint(self.name, self.target, self.group).load()
        except Exception as error:  # a stranger's module may raise anything; what and whose it was goes to the user
            raise PluginError(
                f"{self} cannot be loaded: {type(error).__name__}: {error}; repair or uninstall {self.distribution}"
            ) from error

    def source_hash(self) -> str:
        """SHA-256 over the files of the package that holds the module; see `hash_of_module`."""
        return hash_of_module(self.module)


@cache
def plugins(group: str) -> dict[str, Plugin]:
    """The entry points of one group by name. Raises PluginError naming both if two distributions offer one name."""
    assert group in GROUPS, f"{group} is no entry-point group of treadle"
    found: dict[str, Plugin] = {}
    for point in entry_points(group=group):
        assert point.dist is not None, "a discovered entry point belongs to a distribution"
        plugin = Plugin(group, point.name, point.value, point.dist.name, point.dist.version)
        other = found.setdefault(point.name, plugin)
        if other.distribution != plugin.distribution:
            raise PluginError(f"{other} and {plugin} have the same name; uninstall one of the two")
    return found


def check_clashes(group: str, prefix: str, kind: str, ours: Iterable[str]) -> None:
    """Raises PluginError naming both if a plugin has the name of something of treadle's own."""
    found = plugins(group)
    for name in ours:
        if plugin := found.get(prefix + name):
            raise PluginError(f"{plugin} has the name of treadle's own {kind} {name!r}; uninstall {plugin.distribution} or rename it")


@cache
def hash_of_module(module: str) -> str:
    """SHA-256, in hex, over names and contents of all files of the package that `module` belongs to, without caches.

    The package is the topmost one that has a file of its own, so a namespace is not hashed whole. It is found, not
    imported. Raises PluginError for a module that has no file.
    """
    spec = _package_spec(module)
    digest = hashlib.sha256()
    for name, path in _files(spec, module):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


@cache
def package_of(module: str) -> str:
    """The package whose files `hash_of_module` takes: the topmost one above `module` that has a file."""
    return _package_spec(module).name


def _package_spec(module: str) -> ModuleSpec:
    """Walks from the top down until something is no bare namespace."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        try:
            spec = find_spec(name)
        except (ImportError, ValueError) as error:
            raise PluginError(f"module {module} cannot be found: {error}") from error
        if spec is not None and spec.has_location:
            return spec
    raise PluginError(f"the code of module {module} has no file, so it cannot enter an artifact's key; put it into a module")


def _files(spec: ModuleSpec, module: str) -> list[tuple[str, Path]]:
    """(name inside the package, path), in order of name."""
    if spec.submodule_search_locations is None:
        assert spec.origin is not None, f"{module} has a location"
        return [(Path(spec.origin).name, Path(spec.origin))]
    found = []
    for place in spec.submodule_search_locations:
        root = Path(place)
        for path in root.rglob("*"):
            inside = path.relative_to(root)
            if path.is_file() and not set(inside.parts).intersection(_NOT_SOURCE):
                found.append((inside.as_posix(), path))
    return sorted(found)
