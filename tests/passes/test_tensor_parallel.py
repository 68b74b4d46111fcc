"""Tensor parallelism as a pass: golden text, counts, refusals, and numerics with the ranks as threads (C07-05)."""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import cache

import pytest
import torch

from tests.passes.harness import (
    ARCHITECTURES,
    GOLDEN,
    Case,
    Refusal,
    Weights,
    apply,
    assert_same,
    example_inputs,
    golden_json,
    outputs,
    traced,
)
from treadle.ir.errors import ConfigError, VerifyError
from treadle.ir.graph import Graph
from treadle.ir.group import run_ranks
from treadle.ir.hashing import structural_hash
from treadle.ir.interpret import run
from treadle.ir.ops.registry import get_op
from treadle.ir.text import parse_graph, print_graph
from treadle.ir.verify import verify
from treadle.ir.weights import bind_rank
from treadle.passes.library.fuse_all_reduce_rms_norm import FuseAllReduceRmsNorm
from treadle.passes.library.overlap_all_reduce import OverlapAllReduce
from treadle.passes.library.sequence_parallel import SequenceParallel
from treadle.passes.library.shard_tensor_parallel import ShardTensorParallel
from treadle.passes.pipeline import PipelineOptions, run_pipeline
from treadle.passes.quant.fuse_quantize import FuseAllReduceRmsNormQuant
from treadle.passes.quant.schemes import SCHEMES, scheme_passes

ATTENTION = """graph @g(T in 1..64) {{
  input %x: f32[T,8]
  input %kv.0: kv<2,4>
  input %batch: batch
  param %a.qkv.weight: f32[32,8] = load("a.qkv.weight")
  param %a.qkv.bias: f32[32] = load("a.qkv.bias")
  param %a.o.weight: f32[8,16] = load("a.o.weight")
  param %a.o.bias: f32[8] = load("a.o.bias")
  %qkv: f32[T,32] = linear(%x, %a.qkv.weight, %a.qkv.bias)   // layers.0.a | model.py:1
  %q, %k, %v: f32[T,16], f32[T,8], f32[T,8] = split(%qkv, sizes=[16, 8, 8])
  %q3: f32[T,4,4] = aten.reshape.default(%q, shape=[T, 4, 4])
  %k3: f32[T,2,4] = aten.reshape.default(%k, shape=[T, 2, 4])
  %v3: f32[T,2,4] = aten.reshape.default(%v, shape=[T, 2, 4])
  %o: f32[T,4,4] = attention(%q3, %k3, %v3, %kv.0, %batch, layer=0, scale=0.5)
  %o2: f32[T,16] = aten.reshape.default(%o, shape=[T, 16])
  %y: f32[T,8] = linear(%o2, %a.o.weight, %a.o.bias)   // layers.0.a.o | model.py:9
{end}
}}
"""

MLP = """graph @g(T in 1..64) {
  input %x: f32[T,8]
  param %m.gate_up.weight: f32[24,8] = load("m.gate_up.weight")
  param %m.down.weight: f32[8,12] = load("m.down.weight")
  %gate_up: f32[T,24] = linear(%x, %m.gate_up.weight)
  %gate, %up: f32[T,12], f32[T,12] = split(%gate_up, sizes=[12, 12])
  %act: f32[T,12] = gated_act(%gate, %up, act='silu')
  %y: f32[T,8] = linear(%act, %m.down.weight)   // m.down | model.py:4
  return %y
}
"""

EXPERTS = """graph @g(T in 1..64) {
  input %x: f32[T,8]
  param %router: f32[4,8] = load("router")
  param %gate_up: f32[4,12,8] = load("gate_up")
  param %down: f32[4,8,6] = load("down")
  %scores: f32[T,4] = linear(%x, %router)
  %best, %ids: f32[T,2], i64[T,2] = aten.topk.default(%scores, k=2)
  %y: f32[T,8] = experts(%x, %ids, %best, %gate_up, %down, act='silu')
  return %y
}
"""

VOCABULARY = """graph @g(T in 1..64) {
  input %input_ids: i64[T]
  param %table: f32[19,8] = load("table")
  param %bias: f32[19] = load("bias")
  %h: f32[T,8] = embedding(%table, %input_ids)
  %n: f32[T,8] = rms_norm(%h, eps=1e-06)
  %y: f32[T,19] = linear(%n, %table, %bias)   // head | model.py:2
  %cap: f32[T,19] = aten.tanh.default(%y)
  return %cap
}
"""

NORMED = """graph @g(T in 1..64) {{
  input %x: f32[T,8]
  input %r: f32[T,8]
  param %w: f32[8] = load("w")
  %sum: f32[T,8] = all_reduce(%x, world=2)
  %n, %total: f32[T,8], f32[T,8] = add_rms_norm(%sum, %r, %w, eps=1e-06)   // norm | model.py:3
  %again: f32[T,8] = all_reduce(%n, world=2)
  %m: f32[T,8] = rms_norm(%again, %w, eps=1e-06, offset=1.0)
{end}
}}
"""

QUANTIZED = """graph @g(T in 1..64) {{
  input %x: f32[T,8]
  input %r: f32[T,8]
  param %w: f32[8] = load("w")
  %n, %total: f32[T,8], f32[T,8] = all_reduce_add_rms_norm(%x, %r, %w, world=2, eps=1e-06)   // norm | model.py:3
  %q, %s: i8[T,8], f32[T,1] = quantize_dynamic(%n, key=quant(i8, per_token, dynamic))
  %m: f32[T,8] = all_reduce_rms_norm(%total, %w, world=2, eps=1e-06)
  %q2, %s2: i8[T,8], f32[T,2] = quantize_dynamic(%m, key=quant(i8, dynamic, per_group=4))
{end}
}}
"""

OVERLAP = """graph @g(T in 1..64) {{
  input %x: f32[T,8]
  input %r: f32[T,8]
  param %w: f32[8,8] = load("w")
  param %b: f32[8] = load("b")
  param %g: f32[8] = load("g")
  %p: f32[T,8] = linear(%x, %w, %b)   // o | model.py:3
  %y: f32[T,8] = all_reduce(%p, world=2)
  %p2: f32[T,8] = linear(%y, %w)   // down | model.py:4
  %n, %s: f32[T,8], f32[T,8] = all_reduce_add_rms_norm(%p2, %r, %g, world=2, eps=1e-06)
  %p3: f32[T,8] = linear(%n, %w)
  %m: f32[T,8] = all_reduce_rms_norm(%p3, %g, world=2, eps=1e-06, offset=1.0)
{end}
}}
"""

SEQUENCE = """graph @g(T in 1..64) {{
  input %x: f32[T,8]
  input %r: f32[T,8]
  param %w: f32[8] = load("w")
  %n, %s: f32[T,8], f32[T,8] = all_reduce_add_rms_norm(%x, %r, %w, world=2, eps=1e-06)   // norm | model.py:3
  %a: f32[T,8] = aten.neg.default(%n)
  %m, %t: f32[T,8], f32[T,8] = all_reduce_add_rms_norm(%a, %s, %w, world=2, eps=1e-06)
  %b: f32[T,8] = aten.neg.default(%m)
  %z: f32[T,8] = all_reduce_rms_norm(%b, world=2, eps=1e-06)
{end}
}}
"""

CASES = [
    Case(
        "sequence_parallel",
        SequenceParallel(),
        {"add_rms_norm": 2, "rms_norm": 1},
        SEQUENCE.format(end="  return %z, %t"),
    ),
    Case(
        "overlap_all_reduce",
        OverlapAllReduce(chunks=3),
        {"all_reduce": 1, "add_rms_norm": 1, "rms_norm": 1},
        OVERLAP.format(end="  return %m, %s"),
    ),
    Case(
        "fuse_all_reduce_rms_norm_quant",
        FuseAllReduceRmsNormQuant(),
        {"all_reduce_add_rms_norm_quant": 1, "all_reduce_rms_norm_quant": 1},
        QUANTIZED.format(end="  return %q, %s, %q2, %s2, %total"),
    ),
    Case(
        "shard_tensor_parallel_attention",
        ShardTensorParallel(2),
        {"attention": 1},
        ATTENTION.format(end="  return %y"),
    ),
    Case(
        "shard_tensor_parallel_repeated_heads",
        ShardTensorParallel(4),
        {"attention": 1},
        ATTENTION.format(end="  return %y"),
    ),
    Case("shard_tensor_parallel_mlp", ShardTensorParallel(2), {"mlp": 1}, MLP),
    Case("shard_tensor_parallel_experts", ShardTensorParallel(2), {"experts": 1}, EXPERTS),
    Case("shard_tensor_parallel_vocabulary", ShardTensorParallel(2), {"embedding": 1, "head": 1}, VOCABULARY),
    Case(
        "fuse_all_reduce_rms_norm",
        FuseAllReduceRmsNorm(),
        {"all_reduce_add_rms_norm": 1, "all_reduce_rms_norm": 1},
        NORMED.format(end="  return %m, %total"),
    ),
]

REFUSALS = [
    Refusal(
        "a sum without a norm",
        SequenceParallel(),
        "no norm follows the sum",
        VOCABULARY.replace("rms_norm(%h, eps=1e-06)", "all_reduce(%h, world=2)"),
    ),
    Refusal(
        "a product that is read elsewhere, and sums of no product",
        OverlapAllReduce(),
        "%n is made by add_rms_norm, not by a linear",
        NORMED.format(end="  return %m, %total"),
    ),
    Refusal(
        "a normed sum that is also read unquantized",
        FuseAllReduceRmsNormQuant(),
        "%n is read unquantized too",
        QUANTIZED.format(end="  return %q, %s, %q2, %s2, %n, %m"),
    ),
    Refusal(
        "heads that the ranks do not divide",
        ShardTensorParallel(3),
        "4 attention heads are not a multiple of 3 ranks",
        ATTENTION.format(end="  return %y"),
    ),
    Refusal(
        "a norm over all heads at once",
        ShardTensorParallel(2),
        "rms_norm works over all features at once",
        ATTENTION.format(end="  return %y").replace(
            "  %q3: f32[T,4,4] = aten.reshape.default(%q",
            "  %n: f32[T,16] = rms_norm(%q, eps=1e-06)\n  %q3: f32[T,4,4] = aten.reshape.default(%n",
        ),
    ),
    Refusal(
        "features that are also needed whole",
        ShardTensorParallel(2),
        "%o2 is also read by aten.neg.default, which needs it whole",
        ATTENTION.format(end="  %also: f32[T,16] = aten.neg.default(%o2)\n  return %y, %also"),
    ),
    Refusal(
        "inner features that do not divide",
        ShardTensorParallel(5),
        "12 is not a multiple of 5",
        MLP,
    ),
    Refusal(
        "experts that do not divide",
        ShardTensorParallel(4),
        "their inner features do not divide",
        EXPERTS,
    ),
    Refusal(
        "a sum that is read elsewhere",
        FuseAllReduceRmsNorm(),
        "%sum is also read by aten.neg.default",
        NORMED.format(end="  %other: f32[T,8] = aten.neg.default(%sum)\n  return %m, %total, %other").replace(
            "  %again: f32[T,8] = all_reduce(%n, world=2)\n  %m: f32[T,8] = rms_norm(%again,",
            "  %m: f32[T,8] = rms_norm(%n,",
        ),
    ),
]


def ranks_of(case: Case) -> int:
    return case.step.world if isinstance(case.step, ShardTensorParallel) else 2


def run_on_ranks(graph: Graph, world: int, weights: Weights, inputs: dict) -> list[tuple[torch.Tensor, ...]]:
    """The outputs of every rank, each with its own share of the weights."""

    def one(group):
        params = [bind_rank(p.recipe, group.rank).evaluate(weights.tensors.__getitem__) for p in graph.params]
        return run(graph, [inputs[value.name] for value in graph.inputs], params, group)

    return run_ranks(world, one)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_text_counts_and_a_second_run(case: Case) -> None:
    """The graph and the weight plan read as the golden text, which parses back; a second run has nothing to do."""
    graph, report = apply(case.step, case.before)
    assert report.counts == case.counts
    text = print_graph(graph)
    assert text == case.golden.read_text()
    assert print_graph(parse_graph(text)) == text
    again = case.step.run(graph)
    assert again.matched == 0 and print_graph(graph) == text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_gives_the_whole_result(case: Case) -> None:
    """C07-05: the ranks together compute what one process computes; all of them have the same bits."""
    before, world = parse_graph(case.before), ranks_of(case)
    weights, inputs = Weights(before), example_inputs(before)
    after, _ = apply(case.step, case.before)
    if isinstance(case.step, ShardTensorParallel):
        wanted = outputs(before, weights, inputs)
    else:
        wanted = run_on_ranks(before, world, weights, inputs)[0]
    found = run_on_ranks(after, world, weights, inputs)
    for given in found:
        for one, other in zip(wanted, given, strict=True):
            assert_same(one, other, exact=case.step.tier == "exact")
        assert all(torch.equal(a, b) for a, b in zip(found[0], given, strict=True))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusals_say_why(refusal: Refusal) -> None:
    """What cannot be cut stays whole on every rank, and a near miss names the node and the reason."""
    graph, report = apply(refusal.step, refusal.before)
    assert report.matched == 0, report.counts
    assert print_graph(graph) == print_graph(parse_graph(refusal.before))
    assert any(refusal.reason in miss.predicate for miss in report.near_misses), report.near_misses


@cache
def _whole(name: str) -> Graph:
    return run_pipeline(traced(name), PipelineOptions(verify=False)).fused


@cache
def _sharded(name: str, world: int) -> tuple[Graph, Graph]:
    """(the graph of one process, one rank's graph) of a small model."""
    whole = _whole(name)
    cut = whole.copy()
    ShardTensorParallel(world).run(cut)
    verify(cut, after="shard_tensor_parallel")
    return whole, cut


def collectives_by_layer(graph: Graph) -> dict[str, dict[str, int]]:
    """How many of each collective every layer calls; what is outside the layers stands under its module's name.

    A fused norm belongs to the layer whose sum it makes, which is that of the value that it reads.
    """
    found: dict[str, Counter[str]] = {}
    for node in graph.nodes:
        if get_op(node.op).collective:
            maker = next(node.inputs()).producer
            assert maker is not None
            layer = re.search(r"(?:layers|h)\.\d+", maker.source.path)
            found.setdefault(layer[0] if layer else maker.source.path, Counter())[node.op] += 1
    return {where: dict(sorted(counts.items())) for where, counts in sorted(found.items())}


def collective_counts(name: str) -> dict[str, dict[str, dict[str, int]]]:
    """Before and after the fusion with norms."""
    graph = _sharded(name, 2)[1].copy()
    before = collectives_by_layer(graph)
    FuseAllReduceRmsNorm().run(graph)
    return {"before": before, "after": collectives_by_layer(graph)}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_collectives_of_each_layer(name: str) -> None:
    """Acceptance: the collectives of each layer are those of the golden file, before and after the fusion with norms."""
    assert collective_counts(name) == golden_json("collectives.json")[name]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_equal_one_process(name: str, world: int) -> None:
    """C07-05: logits of every architecture over 2 ranks, and over 4 where two key heads are repeated."""
    whole, cut = _sharded(name, world)
    weights, inputs = Weights(traced(name)), example_inputs(whole)
    (wanted,) = outputs(whole, weights, inputs)
    for (given,) in run_on_ranks(cut, world, weights, inputs):
        assert_same(wanted, given, exact=False)


@pytest.mark.parametrize(("name", "level"), [("llama", 0), ("mixtral", 2)])
def test_ranks_share_pieces(name: str, level: int) -> None:
    """The pipeline cuts a model at every level; its pieces hold no rank, and layers share them as ever."""
    stages = run_pipeline(traced(name), PipelineOptions(level=level, tensor_parallel=2))
    report = next(report for report in stages.reports if report.name == "shard_tensor_parallel")
    assert report.matched == 8
    hashes = [structural_hash(piece) for piece in stages.unified.pieces.values()]
    assert len(hashes) == len(set(hashes)) < 10
    assert not any("rank" in str(param.recipe) for piece in stages.unified.pieces.values() for param in piece.params)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_tokens_on_shares_equal_one_process(name: str, world: int) -> None:
    """Sequence parallel, with token counts that the ranks do not divide: the bits of the sums on all tokens."""
    options = PipelineOptions(tensor_parallel=world, extra_passes=("sequence_parallel",))
    stages = run_pipeline(traced(name), options)
    report = next(report for report in stages.reports if report.name == "sequence_parallel")
    whole = run_pipeline(traced(name), PipelineOptions(tensor_parallel=world))
    fused = sum(node.op.startswith("all_reduce_") for node in whole.fused.nodes)
    assert report.matched == fused > 0
    if world != 3:  # which the heads do not divide, so that attention stays whole
        assert sum(node.op == "own_rows" for node in stages.fused.nodes) == 1, "residuals stay on shares"
    weights, inputs = Weights(traced(name)), example_inputs(whole.fused)
    wanted = run_on_ranks(whole.fused, world, weights, inputs)
    for one, other in zip(wanted, run_on_ranks(stages.fused, world, weights, inputs), strict=True):
        assert_same(one[0], other[0], exact=True)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_overlapped_sums_equal_one_process(name: str) -> None:
    """C07-05: attention and MLP blocks sum in runs of tokens; the logits are those of one process."""
    options = PipelineOptions(tensor_parallel=2, extra_passes=("overlap_all_reduce{chunks=3}",))
    stages = run_pipeline(traced(name), options)
    report = next(report for report in stages.reports if report.name == "overlap_all_reduce")
    assert report.matched >= 2
    whole = _whole(name)
    weights, inputs = Weights(traced(name)), example_inputs(whole)
    (wanted,) = outputs(whole, weights, inputs)
    for (given,) in run_on_ranks(stages.fused, 2, weights, inputs):
        assert_same(wanted, given, exact=False)
    with pytest.raises(ConfigError, match="chunks=1"):
        OverlapAllReduce(chunks=1)


@pytest.mark.parametrize("scheme", SCHEMES.names())
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mixtral"])
def test_quantized_ranks_equal_one_process(name: str, scheme: str) -> None:
    """Quantized after the cut: rows of a share have scales of their own, so ranks differ from one process by rounding only."""
    given = scheme_passes(scheme)
    if "group=64" in str(given):
        given = tuple(text.replace("group=64", "group=8") for text in given)
    whole = run_pipeline(traced(name), PipelineOptions(extra_passes=given)).fused
    cut = run_pipeline(traced(name), PipelineOptions(extra_passes=given, tensor_parallel=2)).fused
    assert sum("linear" in node.op for node in cut.nodes) == sum("linear" in node.op for node in whole.nodes)
    assert any(node.op in ("weight_only_linear", "scaled_linear") for node in cut.nodes)
    assert any(node.op.endswith("rms_norm_quant") and "all_reduce" in node.op for node in cut.nodes) == (
        "only" not in scheme and name != "gpt2"  # whose norms are layer norms
    )
    weights, inputs = Weights(traced(name)), example_inputs(whole)
    plain, (wanted,) = outputs(run_pipeline(traced(name)).fused, weights, inputs)[0], outputs(whole, weights, inputs)
    results = run_on_ranks(cut, 2, weights, inputs)
    noise = (plain - wanted).abs().max()
    for (found,) in results:
        assert torch.equal(found, results[0][0])
        assert (found - plain).abs().max() < 2 * noise + 1e-4, "no further from the unquantized model than one process is"


def test_one_rank_calls_no_collective() -> None:
    """C07-04, R-7.9: with a group of one the graph stays as it is."""
    graph = _sharded("llama", 2)[0].copy()
    text = print_graph(graph)
    assert ShardTensorParallel(1).run(graph).matched == 0 and print_graph(graph) == text
    stages = run_pipeline(traced("llama"))
    assert not any(get_op(node.op).collective for node in stages.fused.nodes)


def test_a_rank_alone_is_refused() -> None:
    """A cut graph without its group raises and names the collective; an impossible number of ranks is a user's error."""
    _, cut = _sharded("llama", 2)
    weights, inputs = Weights(traced("llama")), example_inputs(cut)
    params = [bind_rank(param.recipe, 0).evaluate(weights.tensors.__getitem__) for param in cut.params]
    with pytest.raises(VerifyError, match="all_reduce over 2 ranks needs a group"):
        run(cut, [inputs[value.name] for value in cut.inputs], params)
    with pytest.raises(ConfigError, match="world=0"):
        ShardTensorParallel(0)


def test_the_passes_are_documented_with_a_sketch() -> None:
    """The docstring of each pass's file draws the graph before and after and says what it leaves alone."""
    for step in (ShardTensorParallel, FuseAllReduceRmsNorm):
        text = sys.modules[step.__module__].__doc__ or ""
        assert "->" in text and "Does not handle" in text and GOLDEN.exists()
