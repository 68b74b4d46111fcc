"""The rules of the IR, checked before and after every pass."""

from __future__ import annotations

from treadle.ir.effects import Effects, effects_of, repeated_effect
from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.infer import infer_node
from treadle.ir.ops.registry import get_op
from treadle.ir.text import print_node


def verify(graph: Graph, after: str = "", before: Effects | None = None) -> None:
    """Raises VerifyError naming the node, the rule, and the pass that ran last (`after`).

    With the effects that the graph had `before` that pass, it is also refused if one of them is gone.
    """
    defined: set[Value] = set()
    names: set[str] = set()
    for value in [*graph.inputs, *graph.params]:
        _define(graph, value, defined, names, after)
    for node in graph.nodes:
        problem = _check_call(node, defined)
        if problem:
            raise VerifyError(_message(graph, after, f"{problem}\n  {_show(node)}"))
        for value in node.results:
            if value.producer is not node:
                raise VerifyError(_message(graph, after, f"%{value.name} does not name its producer\n  {_show(node)}"))
            _define(graph, value, defined, names, after)
    for value in graph.outputs:
        if value not in defined:
            raise VerifyError(_message(graph, after, f"output %{value.name} is not defined"))
    if repeated := repeated_effect(graph):
        node, problem = repeated
        raise VerifyError(_message(graph, after, f"an effect is done twice: {problem}\n  {_show(node)}"))
    if before is not None and (lost := before.lost(effects_of(graph))):
        raise VerifyError(_message(graph, after, f"an effect is lost: {lost}"))


def _define(graph: Graph, value: Value, defined: set[Value], names: set[str], after: str) -> None:
    if value.name in names:
        raise VerifyError(_message(graph, after, f"%{value.name} is defined twice"))
    names.add(value.name)
    defined.add(value)


def _check_call(node: Node, defined: set[Value]) -> str | None:
    try:
        op = get_op(node.op)
    except VerifyError as error:
        return str(error)
    for value in node.inputs():
        if value not in defined:
            return f"%{value.name} is used before it is defined"
    given = {*node.operands, *node.attrs}
    if unknown := given - {*op.tensors, *op.attributes}:
        return f"{node.op} has no argument {sorted(unknown)[0]!r}"
    if missing := {*op.tensors, *op.attributes} - given - {*op.defaults}:
        return f"{node.op} needs {sorted(missing)[0]!r}"
    try:
        types = infer_node(node)
    except VerifyError as error:
        return str(error)
    declared = tuple(value.type for value in node.results)
    if types != declared:
        shown = (", ".join(map(str, kinds)) for kinds in (types, declared))
        return "{} gives {} but the results are declared as {}".format(node.op, *shown)
    return None


def _show(node: Node) -> str:
    try:
        return print_node(node)
    except VerifyError:
        return f"{', '.join(value.name for value in node.results)} = {node.op}(...)"


def _message(graph: Graph, after: str, problem: str) -> str:
    return f"graph {graph.name}{f' after {after}' if after else ''}: {problem}"
