"""What an op is: schema, eager reference, fake, effects, and whether the graph is split there.

ATen ops need no row: their schema and reference are torch's own. Ops of the dialect are rows in this room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from treadle.ir.errors import PluginError, VerifyError
from treadle.ir.plugins import Plugin, check_clashes, plugins


@dataclass(frozen=True)
class Op:
    """One op. `tensors` and `attributes` are the schema's argument names in order; `defaults` those left out."""

    name: str
    schema: str
    reference: Callable[..., Any] = field(compare=False)
    tensors: tuple[str, ...]
    attributes: tuple[str, ...]
    lists: frozenset[str]
    defaults: dict[str, Any] = field(compare=False, default_factory=dict)
    num_results: int = 1
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    splits: bool = False
    fake: Callable[..., Any] | None = field(compare=False, default=None)
    inplace: tuple[str, ...] = ()
    variadic_results: bool = False
    collective: bool = False
    doc: str = ""

    @property
    def pure(self) -> bool:
        return not self.writes


_GROUP = "treadle.ops"
_DIALECT: dict[str, Op] = {}


def op(
    schema: str,
    *,
    splits: bool = False,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    collective: bool = False,
    inplace: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a row to the dialect. `schema` is in torch's notation; the decorated function is the eager reference.

    The reference takes every argument by keyword, in plain torch calls that torch.export can trace. `fake` gives
    result tensors on the meta device when running the reference there is not possible. `reads` and `writes` name
    operands that are state. All ranks of a group call a `collective` together; its reference also takes `group`.
    `inplace` names, for each result in order, the operand whose storage a kernel may write it to.
    """

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        row = _from_schema(torch._C.parse_schema(f"treadle::{schema}"), reference)
        name = row.name.removeprefix("treadle.")
        if name in _DIALECT:
            there, here = _DIALECT[name].reference.__module__, reference.__module__
            raise VerifyError(f"op {name!r} is already registered by {there}; {here} must choose another name")
        _DIALECT[name] = dataclasses.replace(
            row,
            name=name,
            schema=schema,
            splits=splits,
            reads=tuple(reads),
            writes=tuple(writes),
            fake=fake,
            collective=collective,
            inplace=tuple(inplace),
            doc=(reference.__doc__ or "").strip(),
        )
        return reference

    return register


def dialect() -> dict[str, Op]:
    """All ops of our own, and those of plugins that are in use, by name."""
    _load_library()
    return dict(_DIALECT)


def plugin_ops() -> dict[str, Plugin]:
    """The ops that other packages offer, by name, not loaded. Raises PluginError if one has the name of an op of ours."""
    _load_library()
    check_clashes(_GROUP, "", "op", [n for n, row in _DIALECT.items() if row.reference.__module__.startswith("treadle.")])
    return plugins(_GROUP)


def _load_library() -> None:
    import treadle.ir.ops.collectives
    import treadle.ir.ops.library
    import treadle.ir.ops.packed
    import treadle.ir.ops.quantization
    import treadle.ir.ops.token_shards  # noqa: F401  (all register their rows)


def _load_plugin_op(plugin: Plugin) -> Op:
    """Importing the module registers the op, unless another import has done so."""
    plugin.load()
    if plugin.name not in _DIALECT:
        raise PluginError(f"{plugin} defines no op of that name; the entry point must be called as the op is in its schema")
    return _DIALECT[plugin.name]


@lru_cache(maxsize=4096)
def get_op(name: str) -> Op:
    """The op behind a name: `rms_norm` (ours or a plugin's) or `aten.add.Tensor`.

    Raises VerifyError for an unknown one, PluginError for a plugin that does not load.
    """
    rows = dialect()
    if name in rows:
        return rows[name]
    if name.count(".") == 2:
        namespace, packet, overload = name.split(".")
        try:
            target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        except AttributeError:
            target = None
        if target is not None:
            return _from_schema(target._schema, target)
    if name in (offered := plugin_ops()):
        return _load_plugin_op(offered[name])
    raise VerifyError(f"unknown op {name!r}; ops of the dialect: {', '.join(sorted({*rows, *offered}))}; torch ops: aten.add.Tensor")


def _from_schema(schema: Any, reference: Callable[..., Any]) -> Op:
    tensors, attributes, lists, defaults = [], [], [], {}
    for argument in schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind:
            tensors.append(argument.name)
            if "List" in kind:
                lists.append(argument.name)
        else:
            attributes.append(argument.name)
        if argument.has_default_value():
            defaults[argument.name] = argument.default_value
    returns = [str(item.type) for item in schema.returns]
    overload = schema.overload_name or ("default" if schema.name.startswith("aten::") else "")
    name = schema.name.replace("::", ".") + (f".{overload}" if overload else "")
    return Op(
        name=name,
        schema=str(schema),
        reference=reference,
        tensors=tuple(tensors),
        attributes=tuple(attributes),
        lists=frozenset(lists),
        defaults=defaults,
        num_results=len(returns),
        variadic_results=any("List" in kind for kind in returns),
    )
