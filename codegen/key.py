"""The key of an artifact: a typed allow-list of what its code depends on, hashed. Imports no torch.

Nothing enters that is not a field here, so no path, host name, environment variable or secret can; `NOT_HASHED` says
what is left out on purpose and why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.ir.errors import ArtifactError

Scalar = str | int | float | bool | None
Value = Scalar | tuple["Value", ...]
Pairs = tuple[tuple[str, Value], ...]

NOT_HASHED: tuple[tuple[str, str], ...] = (
    ("weights", "they are inputs of a piece, so that one artifact serves every layer"),
    ("names and layer index", "the canonical IR leaves them out, so that equal pieces unify"),
    ("paths and host name", "an artifact is the same wherever it is built"),
    ("environment and secrets", "no setting is read from the environment while compiling"),
    ("max_model_len, block size, batch size", "attention is outside the pieces; only the range of token counts matters"),
    ("jobs, store and output", "they decide where and how fast, not what"),
)


@dataclass(frozen=True, kw_only=True)
class ArtifactKey:
    """Equal keys mean equal code. `ir` is the SHA-256 of the canonical IR text (or of a native library's sources).

    `options`, `toolchain`, `kernels` and `plugins` are sorted (name, value) pairs, see `pairs`; a plugin's value is its
    version and the hash of its source.
    """

    kind: str
    ir: str
    start: int
    end: int
    backend: str
    pipeline: tuple[str, ...]
    options: Pairs
    target: str
    features: tuple[str, ...]
    toolchain: Pairs
    kernels: Pairs = ()
    plugins: Pairs = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name))

    @property
    def digest(self) -> str:
        """64 hex digits."""
        return hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).hexdigest()

    def fields(self) -> dict[str, Any]:
        """JSON-able fields, as stored beside the artifact."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def pairs(table: Mapping[str, Any]) -> Pairs:
    """A mapping as sorted pairs; lists become tuples."""
    return tuple((name, _frozen(table[name])) for name in sorted(table))


def key_from_fields(fields: Mapping[str, Any]) -> ArtifactKey:
    """The inverse of `ArtifactKey.fields`. Raises ArtifactError for unknown, missing or ill-typed fields."""
    known = {field.name for field in dataclasses.fields(ArtifactKey)}
    if odd := sorted(known ^ set(fields)):
        raise ArtifactError(f"not the fields of an artifact key: {', '.join(odd)} unknown or missing")
    try:
        return ArtifactKey(**{name: _frozen(value) for name, value in fields.items()})
    except (TypeError, AssertionError) as error:
        raise ArtifactError(f"not the fields of an artifact key: {error}") from error


@dataclass(frozen=True)
class Difference:
    """One leaf on which two keys differ, for example `options.dynamic_threads`."""

    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.a!r} -> {self.b!r}"


def explain(a: ArtifactKey, b: ArtifactKey) -> list[Difference]:
    """Every leaf that differs, in field order; empty for equal keys."""
    left, right = _leaves(a), _leaves(b)
    names = list(dict.fromkeys([*left, *right]))
    return [Difference(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)]


def _leaves(key: ArtifactKey) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(key):
        value = getattr(key, field.name)
        if field.name in ("options", "toolchain", "kernels", "plugins"):
            leaves.update({f"{field.name}.{name}": item for name, item in value})
        else:
            leaves[field.name] = value
    return leaves


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _check(name: str, value: Any) -> None:
    """Keys are built by us: a value of another type, or one that names a place, is our bug."""
    if isinstance(value, tuple):
        for item in value:
            _check(name, item)
        return
    assert value is None or isinstance(value, str | int | float | bool), f"{name} has a {type(value).__name__}"
    assert not (isinstance(value, str) and value.startswith(("/", "~"))), f"{name} holds a path: {value!r}"
