"""A fusion that stops matching says where and why (acceptance 2 of the pass author's promises)."""

from __future__ import annotations

import pytest

from tests.passes.harness import traced
from treadle.ir.graph import Graph, Node
from treadle.passes.base import PassReport
from treadle.passes.pipeline import run_pipeline

NORM = "model.layers.1.input_layernorm"


def _find(graph: Graph, path: str, op: str) -> Node:
    return next(node for node in graph.nodes if node.source.path == path and node.op == op)


def _reports(graph: Graph) -> dict[str, PassReport]:
    return {report.name: report for report in run_pipeline(graph).reports}


@pytest.mark.parametrize(
    ("op", "stops_at"),
    [
        ("aten.pow.Tensor_Scalar", "expected aten.pow.Tensor_Scalar"),
        ("aten.rsqrt.default", "expected aten.rsqrt.default"),
        ("aten.add.Tensor", "expected aten.add.Tensor"),
    ],
)
def test_an_op_removed_by_hand(op: str, stops_at: str) -> None:
    """One op of a norm is taken out: one match fewer, and the report names the place and the failed predicate."""
    whole = _reports(traced("llama"))["raise_rms_norm"].matched
    graph = traced("llama")
    node = _find(graph, NORM, op)
    graph.replace_uses({node.result: next(node.inputs())})
    graph.erase([node])
    report = _reports(graph)["raise_rms_norm"]
    assert report.matched == whole - 1
    misses = [
        miss for miss in report.near_misses if miss.source.startswith(NORM) or stops_at in miss.predicate
    ]
    assert any(stops_at in miss.predicate and miss.matched >= 2 for miss in misses), report.near_misses


def test_an_attribute_changed_by_hand() -> None:
    """The exponent of the square is 3: the report names the node, the attribute and the value found."""
    graph = traced("llama")
    _find(graph, NORM, "aten.pow.Tensor_Scalar").attrs["exponent"] = 3
    (miss,) = _reports(graph)["raise_rms_norm"].near_misses
    assert "exponent must be 2, is 3" in miss.predicate
    assert "aten.pow.Tensor_Scalar" in miss.node and miss.source.startswith(NORM)


def test_a_rope_that_lost_its_sign() -> None:
    """The report of raise_rope names the node that should have been a negation."""
    graph = traced("llama")
    node = next(n for n in graph.nodes if n.op == "aten.neg.default")
    node.op = "aten.abs.default"
    report = _reports(graph)["raise_rope"]
    assert report.matched == 5
    assert any(
        "expected aten.neg.default, found aten.abs.default" in miss.predicate for miss in report.near_misses
    )


def test_what_matches_everywhere_has_no_near_misses() -> None:
    """On an untouched model the raising and fusing passes report no near miss: the list is worth reading."""
    for name, report in _reports(traced("llama")).items():
        assert report.near_misses == [], name


def test_reports_are_plain_data() -> None:
    """Reports go into the bundle as JSON, with sites, counts, options and times."""
    import json

    reports = run_pipeline(traced("llama")).reports
    data = json.loads(json.dumps([report.as_dict() for report in reports]))
    rope = next(report for report in data if report["name"] == "raise_rope")
    assert rope["matched"] == 6 and rope["tier"] == "exact" and len(rope["sites"]) == 6
    assert all(site["source"].startswith("model.layers.") for site in rope["sites"])
