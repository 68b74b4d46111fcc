"""Builds the native kernel libraries through the store, so that each is compiled once for a target and compiler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

from treadle.codegen.counters import COUNTERS
from treadle.codegen.key import ArtifactKey, pairs
from treadle.codegen.store import Store, StoredObject
from treadle.codegen.target import Target
from treadle.codegen.toolchain import CODEGEN_VERSION
from treadle.kernels.native import NativeSource, compile_native, native_sources


def native_key(source: NativeSource, target: Target, compiler: str | None) -> ArtifactKey:
    """The key of a library: its sources, flags and ABI, the architecture and the compiler; no torch in it."""
    ingredients = source.key_ingredients(target.arch, compiler)
    version = ingredients.pop("compiler")
    text = json.dumps(ingredients, sort_keys=True)
    return ArtifactKey(
        kind="native",
        ir=hashlib.sha256(text.encode()).hexdigest(),
        start=1,
        end=1,
        backend="c++",
        pipeline=(),
        options=(),
        target=target.arch,
        features=(),
        toolchain=pairs({"compiler": version, "codegen": CODEGEN_VERSION}),
    )


def compile_natives(
    target: Target,
    store: Store,
    *,
    compiler: str | None = None,
    sources: Mapping[str, NativeSource] | None = None,
    report: Callable[[str], None] = lambda reason: None,
) -> dict[str, StoredObject]:
    """Every native library by name (default: all of kernels/native). They choose vector code when loaded.

    Raises ArtifactError with the compiler's words if one does not build.
    """
    built_all = {}
    for name, source in (native_sources() if sources is None else sources).items():
        stored, built = store.find_or_build(
            native_key(source, target, compiler),
            lambda out, source=source: compile_native(source, target.arch, out, compiler),
            f"native library {name}",
            report,
        )
        COUNTERS.add("compilations" if built else "store_hits")
        built_all[name] = stored
    return built_all
