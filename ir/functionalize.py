"""Calls that change a tensor in place, where the tensor is fresh and nobody holds a view of it.

Those have a functional twin that can stand for them. Anything else needs torch's own functionalisation, which
runs the whole program again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def needs_functionalization(graph: fx.Graph) -> bool:
    """Whether some call changes a tensor in a way that `functional_twin` does not cover."""
    return any(is_mutating(node) and functional_twin(node) is None for node in graph.nodes)


def is_mutating(node: fx.Node) -> bool:
    target = node.target
    return (
        node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    )


def functional_twin(node: fx.Node) -> Any | None:
    """`aten.div.Tensor` for `aten.div_.Tensor(x, ...)`; None if x is a view or has views, or there is no twin."""
    target, changed = node.target, node.args[0]
    assert isinstance(target, torch._ops.OpOverload)
    packet = getattr(torch.ops.aten, target._opname.removesuffix("_"), None)
    if not target._opname.endswith("_") or not isinstance(changed, fx.Node) or packet is None:
        return None
    if _gives_view(changed) or any(_gives_view(user) for user in changed.users if user is not node):
        return None
    return getattr(packet, target._overloadname, None)


def _gives_view(node: fx.Node) -> bool:
    """Whether a call's result may share memory with an argument; graph inputs count as shared."""
    if node.op != "call_function":
        return node.op != "output"
    if not isinstance(node.target, torch._ops.OpOverload):
        producer = node.args[0] if node.args else None
        return not (isinstance(producer, fx.Node) and not _gives_view(producer))
    return any(
        item.alias_info is not None and not item.alias_info.is_write for item in node.target._schema.returns
    )
