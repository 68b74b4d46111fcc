"""Which code from other packages shaped a compile: it enters every artifact's key, and a bundle that still needs it at
run time is refused where it is missing or different. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from treadle.codegen.backends import BACKENDS, Backend
from treadle.codegen.key import Pairs, pairs
from treadle.codegen.manifest import PluginEntry
from treadle.ir.errors import BundleError, PluginError
from treadle.ir.plugins import GROUPS, Plugin, hash_of_module, package_of, plugins

if TYPE_CHECKING:
    from treadle.passes.pipeline import CompiledStages

_OURS = "treadle"
_RUN_AS_TEXT = ("ir",)
"""Formats of artifacts that call the references of their ops when they run."""

_Use = tuple[str, str, bool]
"""(module, what of it is used, whether running the bundle needs it)"""


def used_plugins(stages: CompiledStages, architecture: str, backend: Backend) -> list[PluginEntry]:
    """One entry for each package outside treadle that a pass, an op, the adapter or the backend came from, by name."""
    uses = [use for use in _uses(stages, architecture, backend) if use[0].partition(".")[0] != _OURS]
    owners: dict[tuple[str, str], list[_Use]] = {}
    for use in uses:
        owners.setdefault(_owner(use[0]), []).append(use)
    return [_entry(name, version, found) for (name, version), found in sorted(owners.items())]


def key_pairs(entries: Iterable[PluginEntry]) -> Pairs:
    """What enters a key: name -> version and hash of the source."""
    return pairs({entry.name: (entry.version, entry.source) for entry in entries})


def installed(entry: PluginEntry) -> PluginEntry | None:
    """The same plugin as it is installed here; None if it is not."""
    try:
        found = version(entry.name) if entry.version else ""
        return _with_source(entry, found)
    except (PackageNotFoundError, PluginError):
        return None


def check_plugins(entries: Sequence[PluginEntry], where: str) -> None:
    """Raises BundleError naming the plugin and what needs it, if running the bundle needs one that is not here as it was."""
    for entry in entries:
        if not entry.run_time:
            continue
        needs = f"{where} runs {', '.join(entry.run_time)} of {_title(entry)}"
        here = installed(entry)
        if here is None:
            raise BundleError(f"{needs}, which is not installed here; install {_title(entry)}")
        if here.source != entry.source:
            raise BundleError(
                f"{needs}, and the one installed here is {_title(here)} with other source "
                f"({here.source[:12]} instead of {entry.source[:12]}); install the one it was compiled with, or compile again"
            )


def _uses(stages: CompiledStages, architecture: str, backend: Backend) -> Iterator[_Use]:
    from treadle.codegen.loader import FORMATS
    from treadle.ir.adapters import ADAPTERS
    from treadle.ir.ops.registry import get_op
    from treadle.passes.registry import pass_class

    for name in dict.fromkeys(report.name for report in stages.reports):
        yield pass_class(name).__module__, f"pass {name}", False
    for name, between in _ops(stages).items():
        module = getattr(get_op(name).reference, "__module__", "") if name.count(".") < 2 else _OURS
        yield module, f"op {name}", between or backend.format in _RUN_AS_TEXT
    named = ((ADAPTERS, architecture, False), (BACKENDS, backend.name, False), (FORMATS, backend.format, True))
    for registry, name, run_time in named:
        if name in registry and (plugin := registry.plugin(name)):
            yield plugin.module, f"{registry.kind} {name}", run_time


def _ops(stages: CompiledStages) -> dict[str, bool]:
    """Name of each op in the program -> whether some call of it stands between the pieces."""
    from treadle.passes.split import OpCall

    found = {node.op: False for graph in stages.unified.pieces.values() for node in graph.nodes}
    return found | {step.node.op: True for step in stages.unified.steps if isinstance(step, OpCall)}


def _owner(module: str) -> tuple[str, str]:
    """(name, version) of the distribution that offers something from the module's package; else the package, without one."""
    package = package_of(module)
    for plugin in _all_plugins():
        if package_of(plugin.module) == package:
            return plugin.distribution, plugin.version
    return package, ""


def _all_plugins() -> Iterator[Plugin]:
    for group in GROUPS:
        yield from plugins(group).values()


def _entry(name: str, version: str, uses: Sequence[_Use]) -> PluginEntry:
    bare = PluginEntry(
        name=name,
        version=version,
        source="",
        packages=sorted({package_of(module) for module, _, _ in uses}),
        uses=[what for _, what, _ in uses],
        run_time=[what for _, what, needed in uses if needed],
    )
    return _with_source(bare, version)


def _with_source(entry: PluginEntry, version: str) -> PluginEntry:
    hashes = [hash_of_module(package) for package in entry.packages]
    source = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return PluginEntry(
        name=entry.name,
        version=version,
        source=source,
        packages=entry.packages,
        uses=entry.uses,
        run_time=entry.run_time,
    )


def _title(entry: PluginEntry) -> str:
    return f"{entry.name} {entry.version}".strip()
