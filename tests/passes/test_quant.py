"""Passes of quantization on small graphs: golden text, counts, refusals, numerics."""

from __future__ import annotations

import sys

import pytest

from tests.passes.harness import ARCHITECTURES, Case, Refusal, Weights, apply, example_inputs, outputs, traced
from treadle.ir.errors import ConfigError, VerifyError
from treadle.ir.graph import Param
from treadle.ir.hashing import structural_hash
from treadle.ir.text import parse_graph, print_graph
from treadle.passes.base import run_passes
from treadle.passes.pipeline import PipelineOptions, plan_pipeline, run_pipeline
from treadle.passes.quant.fuse_attention_quant import FuseAttentionQuant
from treadle.passes.quant.fuse_quantize import FuseAddRmsNormQuant, FuseGatedActQuant, FuseRmsNormQuant
from treadle.passes.quant.quantize_activations import QuantizeActivations
from treadle.passes.quant.quantize_weights import QuantizeWeights
from treadle.passes.quant.schemes import SCHEMES, scheme_passes

ALLOWED = 0.05  # of the largest output: what rounding two factors to 8 bits (3 of mantissa for fp8) can do to 8 inputs


def _graph(body: str) -> str:
    return "graph @case(T in 1..64) {\n" + body.strip("\n") + "\n}\n"


LINEARS = _graph("""
  input %x: f32[T,8]
  param %up.weight: f32[6,8] = load("up")
  param %up.bias: f32[6] = load("bias")
  param %down.weight: f32[8,6] = load("down")
  %up: f32[T,6] = linear(%x, %up.weight, %up.bias)   // up | model.py:3
  %down: f32[T,8] = linear(%up, %down.weight)
  return %down""")

WEIGHT_ONLY = _graph("""
  input %x: f32[T,8]
  param %a.quant: i8[6,8] = quantize(load("a"), key=quant(i8, per_channel))
  param %a.scale: f32[6,1] = quantization_scale(load("a"), key=quant(i8, per_channel))
  param %b.quant: i8[6,8] = quantize(load("b"), key=quant(i8, per_channel))
  param %b.scale: f32[6,1] = quantization_scale(load("b"), key=quant(i8, per_channel))
  param %a: f32[6,8] = load("a")
  param %b: f32[6,8] = load("b")
  %up: f32[T,6] = weight_only_linear(%x, %a.quant, %a.scale, key=quant(i8, per_channel))
  %gate: f32[T,6] = weight_only_linear(%x, %b.quant, %b.scale, key=quant(i8, per_channel))
  %ra: f32[T,6] = linear(%x, %a)
  %rb: f32[T,6] = linear(%x, %b)
  return %up, %gate, %ra, %rb""")

EXPERTS = _graph("""
  input %x: f32[T,8]
  param %router: f32[4,8] = load("router")
  param %gate_up: f32[4,12,8] = load("gate_up")
  param %down: f32[4,8,6] = load("down")
  %scores: f32[T,4] = linear(%x, %router)
  %best, %ids: f32[T,2], i64[T,2] = aten.topk.default(%scores, k=2)
  %y: f32[T,8] = experts(%x, %ids, %best, %gate_up, %down, act='silu')   // mlp | model.py:5
  return %y""")
MOE = _graph("""
  input %x: f32[T,8]
  param %router: f32[4,8] = load("router")
  param %gate_up: f32[4,12,8] = load("gate_up")
  param %down: f32[4,8,6] = load("down")
  %y: f32[T,8] = moe(%x, %router, %gate_up, %down, top_k=2, act='silu')   // mlp | model.py:5
  return %y""")

_RAW = """  param %gate_up: f32[4,12,8] = load("gate_up")
  param %down: f32[4,8,6] = load("down")
  %raw: f32[T,8] = moe(%x, %router, %gate_up, %down, top_k=2, act='silu')
  %y: """
MOE_QUANT = print_graph(apply(QuantizeWeights(), MOE)[0]).replace("  %y: ", _RAW).replace("return %y", "return %y, %raw")

_QUANTIZED = """  %q, %s: i8[T,8], f32[T,1] = quantize_dynamic(%y, key=quant(i8, per_token, dynamic))
"""
NORM = """
  input %x: f32[T,8]
  param %w: f32[8] = load("w")
  %y: f32[T,8] = rms_norm(%x, %w, eps=1e-05)   // norm | model.py:3
""" + _QUANTIZED
ADD_NORM = """
  input %x: f32[T,8]
  input %r: f32[T,8]
  param %w: f32[8] = load("w")
  %y, %sum: f32[T,8], f32[T,8] = add_rms_norm(%x, %r, %w, eps=1e-05, offset=1.0)   // norm | model.py:3
  %doubled: f32[T,8] = aten.add.Tensor(%sum, %sum)
""" + _QUANTIZED
GATED = """
  input %gate: f32[T,8]
  input %up: f32[T,8]
  %y: f32[T,8] = gated_act(%gate, %up, act="silu")   // mlp | model.py:9
""" + _QUANTIZED

ATTENTION = _graph("""
  input %q: f32[T,2,4]
  input %k: f32[T,1,4]
  input %v: f32[T,1,4]
  input %kv.0: kv<1,4>
  input %batch: batch
  param %s: f32[1,1] = literal(f32, shape=[1, 1], values=[0.02])
  %o: f32[T,2,4] = attention(%q, %k, %v, %kv.0, %batch, layer=0, scale=0.5)   // attn | model.py:3
  %flat: f32[T,8] = aten.reshape.default(%o, shape=[T, 8])
  %y: i8[T,8] = quantize_static(%flat, %s, key=quant(i8, per_tensor))
  return %y""")
_SCALE = "  param %s: f32[1,1] = literal(f32, shape=[1, 1], values=[0.02])\n"
DYNAMIC = ATTENTION.replace(_SCALE, "").replace("%y: i8[T,8] = quantize_static(%flat, %s, key=quant(i8, per_tensor))", "%y, %t: i8[T,8], f32[T,1] = quantize_dynamic(%flat, key=quant(i8, per_token, dynamic))")

CASES = [
    Case("fuse_attention_quant", FuseAttentionQuant(), {"attention_quant": 1}, ATTENTION),
    Case("quantize_weights_experts", QuantizeWeights(ignore=("router",)), {"experts": 1}, EXPERTS),
    Case("quantize_weights_moe", QuantizeWeights(), {"experts": 1}, MOE),
    Case("quantize_activations_moe", QuantizeActivations(), {"experts": 1}, MOE_QUANT),
    Case("quantize_weights", QuantizeWeights(), {"linear": 2}, LINEARS),
    Case("quantize_weights_fp8", QuantizeWeights(element="f8e4m3", ignore=("down*",)), {"linear": 1}, LINEARS),
    Case("quantize_weights_groups", QuantizeWeights(group=2), {"linear": 2}, LINEARS),
    Case("quantize_activations", QuantizeActivations(), {"dynamic": 2}, WEIGHT_ONLY),
    Case("quantize_activations_groups", QuantizeActivations(group=4, ignore=("b*",)), {"dynamic": 1}, WEIGHT_ONLY),
    Case("quantize_activations_static", QuantizeActivations(scales=("b*=0.03",)), {"dynamic": 1, "static": 1}, WEIGHT_ONLY),
    Case("fuse_rms_norm_quant", FuseRmsNormQuant(), {"rms_norm_quant": 1}, _graph(NORM + "  return %q, %s")),
    Case(
        "fuse_add_rms_norm_quant", FuseAddRmsNormQuant(), {"add_rms_norm_quant": 1},
        _graph(ADD_NORM + "  return %q, %s, %doubled"),
    ),
    Case("fuse_gated_act_quant", FuseGatedActQuant(), {"gated_act_quant": 1}, _graph(GATED + "  return %q, %s")),
]  # fmt: skip

HEAD = _graph("""
  input %ids: i64[T]
  param %table: f32[16,8] = load("table")
  %x: f32[T,8] = embedding(%table, %ids)
  %logits: f32[T,16] = linear(%x, %table)
  %capped: f32[T,16] = aten.mul.Tensor(%logits, other=2.0)
  return %capped""")

REFUSALS = [
    Refusal("attention with a dynamic scale", FuseAttentionQuant(), "from the whole row", DYNAMIC),
    Refusal("attention that is also read unquantized", FuseAttentionQuant(), "%flat is read elsewhere", ATTENTION.replace("return %y", "return %y, %flat")),
    Refusal("attention that is not quantized", FuseAttentionQuant(), "goes to aten.neg.default unquantized", ATTENTION.replace(_SCALE, "").replace("%y: i8[T,8] = quantize_static(%flat, %s, key=quant(i8, per_tensor))", "%y: f32[T,8] = aten.neg.default(%flat)")),
    Refusal("the head", QuantizeWeights(), "it makes the logits", HEAD),
    Refusal("a weight with another reader", QuantizeWeights(), "is read by aten.neg.default too", _graph(
        '  input %x: f32[T,8]\n  param %w: f32[8,8] = load("w")\n  %y: f32[T,8] = linear(%x, %w)\n'
        "  %z: f32[8,8] = aten.neg.default(%w)\n  return %y, %z")),
    Refusal("an ignored expert", QuantizeWeights(ignore=("down",)), "matches 'down' of ignore", MOE),
    Refusal("odd groups of experts", QuantizeActivations(group=3), "do not divide into groups", MOE_QUANT),
    Refusal("an ignored name", QuantizeWeights(ignore=("*.weight",)), "matches '*.weight' of ignore", LINEARS),
    Refusal("odd groups", QuantizeWeights(group=5), "do not divide into groups of 5", LINEARS),
    Refusal("weights in full", QuantizeActivations(), "", LINEARS),
    Refusal("odd groups of inputs", QuantizeActivations(group=3), "do not divide into groups of 3", WEIGHT_ONLY),
    Refusal("a norm read twice", FuseRmsNormQuant(), "%y is read unquantized too", _graph(NORM + "  return %q, %s, %y")),
    Refusal("a sum's norm read twice", FuseAddRmsNormQuant(), "%y is read", _graph(ADD_NORM + "  return %q, %s, %y")),
    Refusal("a product read twice", FuseGatedActQuant(), "%y is read", _graph(GATED + "  return %q, %s, %y")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_text_counts_and_second_run(case: Case) -> None:
    """The rewritten graph reads as its golden text, parses back, and a second run finds nothing."""
    graph, report = apply(case.step, case.before)
    text = print_graph(graph)
    assert report.counts == case.counts
    assert text == case.golden.read_text()
    assert print_graph(parse_graph(text)) == text
    assert case.step.run(graph).matched == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_are_kept(case: Case) -> None:
    """Bitwise for the fusions; within the rounding of 8 bits for passes that quantize."""
    before = parse_graph(case.before)
    weights, inputs = Weights(before), example_inputs(before)
    after, _ = apply(case.step, case.before)
    wanted, given = outputs(before, weights, inputs), outputs(after, weights, inputs)
    for one, other in zip(wanted, given, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        if case.step.tier == "exact":
            assert one.equal(other)
        else:
            assert (one - other).abs().max() <= ALLOWED * one.abs().max()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusals_say_why(refusal: Refusal) -> None:
    """What must not match stays as it is, with the failed predicate."""
    graph, report = apply(refusal.step, refusal.before)
    assert report.matched == 0 and print_graph(graph) == print_graph(parse_graph(refusal.before))
    reasons = [miss.predicate for miss in report.near_misses]
    assert bool(reasons) == bool(refusal.reason) and any(refusal.reason in text for text in reasons or [""])


def test_passes_are_documented_with_a_sketch() -> None:
    """Each file draws the graph before and after and says its tier."""
    for step in {type(case.step) for case in CASES}:
        text = sys.modules[step.__module__].__doc__ or ""
        assert "->" in text and ("Exact" if step.tier == "exact" else "Changing") in text


def test_the_key_is_part_of_the_structure() -> None:
    """C11-01: graphs that differ in a key only have different structural hashes."""
    other = WEIGHT_ONLY.replace("%a.scale, key=quant(i8, per_channel))", "%a.scale, key=quant(i8, per_tensor))")
    assert structural_hash(parse_graph(WEIGHT_ONLY)) != structural_hash(parse_graph(other))


@pytest.mark.parametrize("name", SCHEMES.names())
def test_every_scheme_can_be_planned(name: str) -> None:
    """The passes of a scheme exist and their order fits what they declare; without the raised ops it is refused."""
    plan_pipeline(PipelineOptions(extra_passes=scheme_passes(name)))
    with pytest.raises(ConfigError, match="requires 'raise_linear'"):
        plan_pipeline(PipelineOptions(level=0, extra_passes=scheme_passes(name)))


def test_bad_options_are_refused() -> None:
    """A scale that is none, an element type that is none, a scheme that is none: the choices are listed."""
    with pytest.raises(ConfigError, match=r"pattern=scale"):
        QuantizeActivations(scales=("*down*",))
    with pytest.raises(VerifyError, match="i8, f8e4m3"):
        QuantizeWeights(element="i4")
    with pytest.raises(ConfigError, match="fp8, fp8_weight_only, int8"):
        scheme_passes("int3")


def test_all_together_on_a_block() -> None:
    """Norm, linears and gate of a block: fused and unfused graphs give the same bits."""
    block = _graph("""
  input %x: f32[T,8]
  param %n: f32[8] = load("n")
  param %g: f32[16,8] = load("g")
  param %d: f32[8,8] = load("d")
  %y: f32[T,8] = rms_norm(%x, %n, eps=1e-05)
  %both: f32[T,16] = linear(%y, %g)
  %a, %b: f32[T,8], f32[T,8] = split(%both, sizes=[8, 8])
  %h: f32[T,8] = gated_act(%a, %b, act="silu")
  %o: f32[T,8] = linear(%h, %d)
  return %o""")
    weights, inputs = Weights(parse_graph(block)), example_inputs(parse_graph(block))
    unfused = parse_graph(block)
    run_passes(unfused, [QuantizeWeights(element="f8e4m3"), QuantizeActivations()])
    fused = unfused.copy()
    reports = run_passes(fused, [FuseRmsNormQuant(), FuseGatedActQuant()], done=["quantize_dynamic"])
    assert [report.matched for report in reports] == [1, 1]
    assert len(fused.nodes) == len(unfused.nodes) - 2
    assert outputs(unfused, weights, inputs)[0].equal(outputs(fused, weights, inputs)[0])


def test_a_tied_head_leaves_the_table_to_the_lookup() -> None:
    """The head reads a quantized copy, the embedding the rows of the plain one."""
    graph = parse_graph(HEAD)
    assert QuantizeWeights(head=True).run(graph).matched == 1
    (lookup,) = [node for node in graph.nodes if node.op == "embedding"]
    (head,) = [node for node in graph.nodes if node.op == "weight_only_linear"]
    table, weight = next(value for value in lookup.inputs() if isinstance(value, Param)), head.operand("weight")
    assert str(table.type.dtype) == "f32" and weight is not None and str(weight.type.dtype) == "i8"


@pytest.mark.parametrize("scheme", SCHEMES.names())
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_quantizes(name: str, scheme: str) -> None:
    """All linears (the head's where the scheme says so) and all experts, in every architecture; logits move by rounding only."""
    given = tuple(text.replace("group=64", "group=8") for text in scheme_passes(scheme))
    plain = run_pipeline(traced(name)).fused
    stages = run_pipeline(traced(name), PipelineOptions(extra_passes=given))
    report = next(report for report in stages.reports if report.name == "quantize_weights")
    takers = [node for node in plain.nodes if node.op in ("linear", "moe", "experts")]
    left = 0 if any("head=true" in text for text in given) else 1
    assert report.matched == len(takers) - left and len(report.near_misses) == left, report.near_misses
    assert not any(node.op in ("moe", "experts") for node in stages.fused.nodes)
    weights, inputs = Weights(traced(name)), example_inputs(plain)
    (wanted,), (found,) = outputs(plain, weights, inputs), outputs(stages.fused, weights, inputs)
    assert 0 < (wanted - found).abs().max() < 0.2 * wanted.abs().max()
