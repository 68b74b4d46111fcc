"""The text of every stage, and after every pass, is the graph: it parses back, runs to the same bits, and folds."""

from __future__ import annotations

import pytest
import torch

from tests.passes.harness import (
    ARCHITECTURES,
    TOKENS,
    Weights,
    assert_same,
    example_inputs,
    golden_json,
    match_counts,
    outputs,
    split_outputs,
    traced,
    traced_text,
)
from treadle.ir.fold import fold_text
from treadle.ir.graph import Graph
from treadle.ir.hashing import structural_hash
from treadle.ir.repeat_text import expand_text
from treadle.ir.text import parse_graph, print_graph
from treadle.ir.verify import verify
from treadle.passes.pipeline import known_passes, run_pipeline
from treadle.passes.split import SplitGraph
from treadle.passes.split_text import parse_split, print_stage


def parse_stage(text: str) -> Graph | SplitGraph:
    return parse_split(text) if "\nprogram @" in text else parse_graph(text)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_text_after_every_pass_and_of_every_stage(architecture: str) -> None:
    """Acceptance 1: print, parse, print is identical, and the parsed graph gives bitwise the same outputs."""
    graph = traced(architecture)
    weights, inputs = Weights(graph), {**example_inputs(graph), "logit_rows": torch.arange(TOKENS)}
    seen = []

    def check(name: str, graph: Graph) -> None:
        text = print_graph(graph)
        parsed = parse_graph(text)
        assert print_graph(parsed) == text, name
        (wanted,), (given,) = outputs(graph, weights, inputs), outputs(parsed, weights, inputs)
        assert_same(wanted, given, exact=True)
        seen.append(name)

    check("traced", graph)
    stages = run_pipeline(graph, observe=check)
    assert seen[1:] == [report.name for report in stages.reports if report.matched]
    for name in ("split", "unified"):
        program = stages.stages()[name]
        text = print_stage(program)
        parsed = parse_stage(text)
        assert isinstance(program, SplitGraph) and isinstance(parsed, SplitGraph)
        assert print_stage(parsed) == text, name
        wanted, given = split_outputs(program, weights, inputs), split_outputs(parsed, weights, inputs)
        assert_same(wanted, given, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "qwen3_moe"])
def test_folded_stages_are_the_same_graph(architecture: str) -> None:
    """Folded text of every stage is shorter, stays as it is when folded again, and parses to the whole graph."""
    graph = traced(architecture)
    stages = run_pipeline(graph)
    weights, inputs = Weights(graph), {**example_inputs(graph), "logit_rows": torch.arange(TOKENS)}
    for name, text in stages.texts().items():
        folded = fold_text(text)
        assert "  repeat i in " in folded and len(folded.splitlines()) < len(text.splitlines()), name
        assert fold_text(folded) == folded == fold_text(expand_text(folded)), name
        whole, parsed = parse_stage(text), parse_stage(folded)
        if isinstance(whole, Graph) and isinstance(parsed, Graph):
            verify(parsed)
            assert structural_hash(parsed) == structural_hash(whole), name
            assert [(p.name, p.recipe) for p in parsed.params] == [(p.name, p.recipe) for p in whole.params]
    for form in (stages.fused, stages.unified):
        again = parse_stage(fold_text(print_stage(form)))
        if isinstance(form, Graph):
            assert isinstance(again, Graph)
            (wanted,), (given,) = outputs(form, weights, inputs), outputs(again, weights, inputs)
        else:
            assert isinstance(again, SplitGraph)
            wanted, given = split_outputs(form, weights, inputs), split_outputs(again, weights, inputs)
        assert_same(wanted, given, exact=True)


def test_thirty_layers_print_once() -> None:
    """SmolLM2 as traced, 30 layers, is stored folded, in a hundred lines; the fused graph is shorter still."""
    text = traced_text("smollm2")
    assert len(text.splitlines()) < 110 and fold_text(expand_text(text)) == text
    graph = traced("smollm2")
    assert len(graph.nodes) > 1000 and len(graph.inputs) == 33


@pytest.mark.slow
def test_match_counts_of_smollm2() -> None:
    """Acceptance 2: what each fusion finds in the 30 layers stands in the golden file."""
    stages = run_pipeline(traced("smollm2"))
    given = {"pieces": list(stages.unified.pieces), "matches": match_counts(stages.reports)}
    assert given == golden_json("match_counts.json")["smollm2"]
    folded = fold_text(print_graph(stages.fused))
    assert "  repeat i in 1..29 {\n    %L{i}.rms_norm, %L{i}.add" in folded and len(folded.splitlines()) < 80


def test_every_fusion_is_counted_somewhere() -> None:
    """The golden counts have a match of each pass of the pipeline that names or joins ops, so none can fall silent."""
    counted = {name for row in golden_json("match_counts.json").values() for name in row["matches"]}
    cleaning = {"canonicalise", "drop_batch_dim", "eliminate_dead_code", "eliminate_common_subexpressions"}
    cleaning.add("fold_constants")
    cleaning |= {"shard_tensor_parallel", "fuse_all_reduce_rms_norm"}  # counted in collectives.json
    cleaning.add("prepack_weights")  # counted in test_packing.py: it runs for some code generators only
    assert set(known_passes()) - cleaning <= counted
