"""Storage plans: sharing, in-place forms and views, the checker that refuses wrong plans, and runs in planned bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.passes.harness import Weights, example_inputs, traced
from treadle.ir.build import make_node
from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Param, Value
from treadle.ir.interpret import run
from treadle.ir.text import parse_graph
from treadle.ir.types import T, TensorType, tensor
from treadle.ir.weights import Load
from treadle.passes.aliases import Affine
from treadle.passes.bufferise import Buffer, Place, Plan, plan_graph, plan_program
from treadle.passes.bufferise_check import check_plan, run_planned
from treadle.passes.pipeline import run_pipeline
from treadle.passes.storage_report import storage_report

CHAIN = """graph @chain(T in 1..64) {
  input %x: f32[T,16]
  param %w: f32[16,16] = load("w")
  %a: f32[T,16] = linear(%x, %w)
  %b: f32[T,16] = aten.silu.default(%a)
  %c: f32[T,16] = linear(%b, %w)
  %d: f32[T,16] = linear(%c, %w)
  %e: f32[T,16] = linear(%d, %w)
  return %e
}
"""


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral"])
def test_a_program_reports_its_memory(architecture: str) -> None:
    """Each piece and what lies between them, from checked plans; sharing takes less than giving every value its own bytes."""
    program = run_pipeline(traced(architecture)).unified
    report = storage_report(program)
    assert set(report["pieces"]) == set(program.pieces) and report["tokens"] == program.tokens[1]
    rows = [*report["pieces"].values(), report["between"]]
    assert all(row["arena_bytes"] + row["output_bytes"] <= row["unshared_bytes"] for row in rows)
    assert sum(row["arena_bytes"] for row in rows) < sum(row["unshared_bytes"] for row in rows) / 2
    assert any(row["in_place"] for row in rows) and any(row["views"] for row in rows)


def test_a_chain_takes_two_places() -> None:
    """silu is written over its operand, dead values share bytes, the output has storage of its own."""
    graph = parse_graph(CHAIN)
    plan = plan_graph(graph)
    check_plan(graph, plan)
    assert plan.places["b"] == Place("a", over="a")
    assert plan.arena == Affine(128, 0) and plan.unshared == Affine(320, 0)
    assert plan.buffers["e"].offset is None
    assert plan.report(64) == "20480 bytes of computed values at T = 64; 8192 in the shared arena (128*T)"


def _swapped(plan: Plan, **buffers: Buffer) -> Plan:
    return replace(plan, buffers={**plan.buffers, **buffers})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: _swapped(p, c=replace(p.buffers["c"], offset=p.buffers["a"].offset)), "writes %c over %b"),
        (lambda p: _swapped(p, c=Buffer(Affine(0, 64), Affine(0, 0))), "%c does not fit"),
        (lambda p: replace(p, arena=Affine(64, 0)), "do not lie within the arena"),
        (lambda p: _swapped(p, e=Buffer(p.buffers["e"].size, Affine(64, 0))), "output %e lives in the arena"),
        (lambda p: replace(p, places={**p.places, "b": Place("x", over="x")}), "written over the input %x"),
        (lambda p: replace(p, places={**p.places, "c": Place("a", over="b")}), "writes %c over %b"),
        (lambda p: replace(p, places={**p.places, "b": Place("a", view_of="a")}), "%b is not a view of %a"),
    ],
)
def test_wrong_plans_are_refused(change: object, reason: str) -> None:
    """The checker names the value and what is wrong with it."""
    graph = parse_graph(CHAIN)
    plan = change(plan_graph(graph))  # type: ignore[operator]
    with pytest.raises(VerifyError, match=reason):
        check_plan(graph, plan)


def test_a_view_keeps_its_base_alive() -> None:
    """A part of a split is read late: nothing is written over the split value until then, nor in place."""
    graph = parse_graph(
        """graph @views(T in 1..64) {
  input %x: f32[T,16]
  param %w: f32[16,16] = load("w")
  %a: f32[T,16] = linear(%x, %w)
  %p, %q: f32[T,8], f32[T,8] = split(%a, sizes=[8, 8])
  %s: f32[T,16] = aten.silu.default(%a)
  %b: f32[T,16] = linear(%s, %w)
  %c: f32[T,16] = linear(%b, %w)
  %d: f32[T,8] = aten.slice.Tensor(%c, dim=1, end=8)
  %e: f32[T,8] = aten.add.Tensor(%d, %q)
  return %e
}
"""
    )
    plan = plan_graph(graph)
    check_plan(graph, plan)
    assert plan.places["q"] == Place("a", view_of="a") and plan.places["s"] == Place("s")
    sharing = replace(plan, places={**plan.places, "s": Place("a", over="a")})
    with pytest.raises(VerifyError, match="writes %s over %[aq]"):
        check_plan(graph, sharing)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "qwen3_moe"])
def test_pieces_run_in_planned_bytes(architecture: str) -> None:
    """Every piece, and the program over them: the plan checks out, saves bytes, and gives the same bits."""
    stages = run_pipeline(traced(architecture))
    plan = plan_program(stages.split)
    check_plan(stages.split, plan)
    assert plan.arena.at(64) < plan.unshared.at(64) / 2
    for piece in stages.unified.pieces.values():
        plan = plan_graph(piece)
        check_plan(piece, plan)
        assert plan.arena.at(64) <= plan.unshared.at(64)
        _assert_equal_bits(piece, plan)


def _assert_equal_bits(graph: Graph, plan: Plan) -> None:
    for param in graph.params:
        param.recipe = Load(param.name)
    weights, named = Weights(graph).of(graph.params), example_inputs(graph)
    inputs = [named[value.name] for value in graph.inputs]
    before = [item.clone() for item in inputs if isinstance(item, torch.Tensor)]
    wanted = run(graph, inputs, weights)
    given = run_planned(graph, plan, inputs, weights)
    for one, other in zip(wanted, given, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(before, [item for item in inputs if isinstance(item, torch.Tensor)], strict=True):
        assert torch.equal(one, other), "an input was written to"


_STEPS = st.sampled_from(
    ["add", "mul", "silu", "neg", "linear", "norm", "add_norm", "split", "permute", "cat"]
)
_RECIPES = st.lists(st.tuples(_STEPS, st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=14)


def _random_graph(recipe: list[tuple[str, int, int]], outputs: list[int]) -> Graph:
    """Any graph over f32[T,8] values with views in it, of sizes T and a constant."""
    x, y = (Value(name, tensor("f32", (T, 8))) for name in "xy")
    weight = Param("w", tensor("f32", (8, 8)), recipe=Load("w"))
    graph, pool = Graph("random", [x, y], [weight], tokens=(1, 64)), [x, y]

    def call(op: str, *operands: object, **attrs: object) -> Value:
        node = make_node(graph, op, *operands, **attrs)  # type: ignore[arg-type]
        graph.nodes.append(node)
        return node.results[0]

    for kind, i, j in recipe:
        a, b = pool[i % len(pool)], pool[j % len(pool)]
        if kind in ("add", "mul"):
            made = [call(f"aten.{kind}.Tensor", a, b)]
        elif kind in ("silu", "neg"):
            made = [call(f"aten.{kind}.default", a)]
        elif kind == "linear":
            made = [call("linear", a, weight)]
        elif kind == "norm":
            made = [call("rms_norm", a, eps=1e-6)]
        elif kind == "add_norm":
            call("add_rms_norm", a, b, eps=1e-6)
            made = list(graph.nodes[-1].results)
        elif kind == "split":
            call("split", a, sizes=[4, 4])
            made = [call("aten.cat.default", list(graph.nodes[-1].results)[::-1], dim=1)]
        elif kind == "permute":
            turned = call("aten.permute.default", a, dims=[1, 0])
            made = [call("aten.reshape.default", call("aten.neg.default", turned), shape=[T, 8])]
        else:
            halves = [call("aten.slice.Tensor", item, dim=1, end=4) for item in (a, b)]
            made = [call("aten.cat.default", halves, dim=1)]
        pool += made
    graph.outputs = list(dict.fromkeys(pool[index % len(pool)] for index in outputs))
    return graph


@settings(max_examples=60, deadline=None)
@given(_RECIPES, st.lists(st.integers(0, 20), min_size=1, max_size=3))
def test_random_graphs_keep_every_bit(recipe: list[tuple[str, int, int]], outputs: list[int]) -> None:
    """A plan for any graph passes the checker, and running in its bytes equals running functionally."""
    graph = _random_graph(recipe, outputs)
    plan = plan_graph(graph)
    check_plan(graph, plan)
    _assert_equal_bits(graph, plan)


@settings(max_examples=60, deadline=None)
@given(_RECIPES, st.integers(0, 20), st.integers(0, 20))
def test_sabotaged_plans_are_refused(recipe: list[tuple[str, int, int]], first: int, second: int) -> None:
    """Two storages that live at once are moved to the same bytes: the checker always notices."""
    graph = _random_graph(recipe, [len(recipe) + 1])
    plan = plan_graph(graph)
    inside = [name for name, buffer in plan.buffers.items() if buffer.offset is not None]
    assume(len(inside) > 1)
    one, other = inside[first % len(inside)], inside[second % len(inside)]
    assume(one != other and _live_together(graph, plan, one, other))
    broken = _swapped(plan, **{one: replace(plan.buffers[one], offset=plan.buffers[other].offset)})
    broken = replace(broken, arena=Affine.above([plan.arena, Affine(4096, 4096)]))
    with pytest.raises(VerifyError, match="still needed"):
        check_plan(graph, broken)


def _live_together(graph: Graph, plan: Plan, one: str, other: str) -> bool:
    """Whether some value in the one storage is written while one in the other is read at or after that step."""
    writes: dict[str, list[int]] = {one: [], other: []}
    reads: dict[str, list[int]] = {one: [], other: []}
    for at, node in enumerate(graph.nodes):
        for value in node.results:
            place = plan.places[value.name]
            if place.storage in writes and not place.view_of:
                writes[place.storage].append(at)
        for value in node.inputs():
            storage = plan.places[value.name].storage if value.name in plan.places else ""
            if storage in reads:
                reads[storage].append(at)
    return any(
        min(writes[a]) < min(writes[b]) <= max(reads[a], default=-1) for a, b in ((one, other), (other, one))
    )


def test_a_size_that_is_no_line_is_refused() -> None:
    """T times T bytes cannot be planned: the error names the value and its type."""
    from treadle.passes.aliases import storage_bytes

    value = Value("scores", TensorType(tensor("f32", ()).dtype, (T, T)))
    with pytest.raises(VerifyError, match=r"%scores: the size of f32\[T,T\] is not affine"):
        storage_bytes(value)
