"""The matcher and the rewriter on their own."""

from __future__ import annotations

import pytest

from treadle.ir.graph import Graph, Value
from treadle.ir.text import parse_graph, print_graph
from treadle.ir.types import DTYPES
from treadle.ir.verify import verify
from treadle.passes.base import PassReport
from treadle.passes.match import Attr, Env, OpCall, Trail, bind, cast_of, keep, op, weight
from treadle.passes.rewrite import Match, Rule, rewrite
from treadle.passes.rewriter import Rewriter

TEXT = """graph @g(T in 1..8) {
  input %x: f32[T,4]
  param %w: f32[4] = load("w")
  %neg: f32[T,4] = aten.neg.default(%x)
  %mul: f32[T,4] = aten.mul.Tensor(%w, %neg)   // m | m.py:1
  %add: f32[T,4] = aten.add.Tensor(%mul, other=2.0)
  return %add
}
"""


def _match(pattern: OpCall, name: str) -> tuple[dict[str, object] | None, Trail]:
    node = next(node for node in parse_graph(TEXT).nodes if node.results[0].name == name)
    trail = Trail()
    env = next(pattern.match_node(node, Env(), trail), None) if node.op in pattern.ops else None
    return (None if env is None else dict(env.bound)), trail


def test_operands_commute() -> None:
    """The pattern has the weight last, the graph has it first."""
    bound, _ = _match(op("aten.mul.Tensor", op("aten.neg.default", bind("x")), weight("w")), "mul")
    assert bound is not None and [bound[k].name for k in ("x", "w")] == ["x", "w"]  # type: ignore[attr-defined]


def test_attributes_bind_and_test() -> None:
    """An attribute is compared, tested with words, or bound; its schema default counts if it is left out."""
    assert _match(op("aten.add.Tensor", bind("x"), None, other=keep("k"), alpha=1), "add")[0]["k"] == 2.0  # type: ignore[index]
    bound, trail = _match(
        op("aten.add.Tensor", bind("x"), None, other=Attr("below 1", lambda v: v < 1)), "add"
    )
    assert bound is None and trail.predicate == "aten.add.Tensor: other must be below 1, is 2.0"


def test_the_trail_names_the_furthest_stop() -> None:
    """Of two failures the one after more matched nodes is kept, at the node that was found instead."""
    pattern = op(
        "aten.add.Tensor", op("aten.mul.Tensor", weight("w"), op("aten.abs.default", bind("x"))), None
    )
    bound, trail = _match(pattern, "add")
    assert (
        bound is None
        and trail.matched == 2
        and trail.node is not None
        and trail.node.results[0].name == "neg"
    )
    assert trail.predicate == "expected aten.abs.default, found aten.neg.default"


def test_one_name_is_one_value() -> None:
    """A name bound twice must be the same value."""
    assert _match(op("aten.mul.Tensor", bind("x"), bind("x")), "mul")[0] is None


def test_casts_are_optional() -> None:
    """`cast_of` takes the value with or without a cast."""
    assert _match(op("aten.neg.default", cast_of(bind("x"))), "neg")[0] is not None


def test_operand_that_must_be_absent() -> None:
    """None in a pattern is an operand that the call leaves out."""
    assert _match(op("aten.mul.Tensor", bind("x"), None), "mul")[0] is None


def _double(rewriter: Rewriter, match: Match) -> Value:
    return rewriter.call("aten.add.Tensor", match["x"], match["x"]).result


def _run(graph: Graph, rule: Rule) -> PassReport:
    report = rewrite(graph, PassReport("test", "exact"), [rule])
    verify(graph, after="test")
    return report


def test_replacement_is_spliced_and_the_rest_removed() -> None:
    """The new node stands where the root was; what only the match read is gone, parameters too."""
    graph = parse_graph(TEXT)
    rule = Rule("double", op("aten.mul.Tensor", weight("w"), op("aten.neg.default", bind("x"))), _double)
    report = _run(graph, rule)
    assert report.counts == {"double": 1} and report.sites[0].source == "m | m.py:1"
    assert [node.op for node in graph.nodes] == ["aten.add.Tensor", "aten.add.Tensor"] and graph.params == []


def test_a_value_used_outside_stops_the_match() -> None:
    """A node inside a match may have no reader outside it, and may not be an output."""
    rule = Rule("double", op("aten.mul.Tensor", weight("w"), op("aten.neg.default", bind("x"))), _double)
    graph = parse_graph(TEXT.replace("return %add", "return %add, %neg"))
    (miss,) = _run(graph, rule).near_misses
    assert miss.predicate == "%neg is an output of the graph" and miss.matched == 2


def test_a_replacement_of_another_type_is_a_near_miss() -> None:
    """A rule whose result would differ in type is refused, and leaves no trace in the graph."""

    def widen(rewriter: Rewriter, match: Match) -> Value:
        return rewriter.call("aten.to.dtype", match["x"], dtype=DTYPES["f64"]).result

    graph = parse_graph(TEXT)
    text = print_graph(graph)
    rule = Rule("widen", op("aten.neg.default", bind("x")), widen)
    (miss,) = _run(graph, rule).near_misses
    assert "would give f64[T,4] where the model has f32[T,4]" in miss.predicate and print_graph(graph) == text


def test_names_stay_unique() -> None:
    """Fresh names never collide, whatever the hints."""
    rewriter = Rewriter(parse_graph(TEXT))
    names = [rewriter.fresh(hint) for hint in ("add", "add", "add.1", "mul", "new", "new")]
    assert len(set(names)) == len(names) and not set(names) & {"add", "mul", "neg", "x", "w"}


@pytest.mark.parametrize("count", [2, 50])
def test_every_site_is_found(count: int) -> None:
    """A chain of equal sites: each is rewritten once."""
    lines = ["graph @g(T in 1..8) {", "  input %v0: f32[T,4]"]
    lines += [f"  %v{i + 1}: f32[T,4] = aten.neg.default(%v{i})" for i in range(count)]
    graph = parse_graph("\n".join([*lines, f"  return %v{count}", "}"]))
    assert _run(graph, Rule("double", op("aten.neg.default", bind("x")), _double)).matched == count
