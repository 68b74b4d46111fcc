"""Measured choices: a fusion that is slower is left out with both times; nothing is measured for another machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.models import save_model
from tests.passes.harness import traced_text
from treadle.codegen import compile as compile_module
from treadle.codegen.bundle import open_bundle
from treadle.codegen.profit import Profit, choose_by_time
from treadle.codegen.target import TARGETS, Target, resolve_target
from treadle.codegen.time_pieces import interleaved, usable_counts
from treadle.ir.text import parse_graph
from treadle.passes.pipeline import CompiledStages, PipelineOptions, run_pipeline

FUSIONS = {"fuse_add_rms_norm", "fuse_qkv", "fuse_gate_up"}


@cache
def stages(without: tuple[str, ...] = ()) -> CompiledStages:
    return run_pipeline(parse_graph(traced_text("llama")), PipelineOptions(without=without))


class Fake:
    """Builds pieces that do nothing and takes times from their ops: `slow` ops cost ten, others one."""

    def __init__(self, slow: str):
        self.slow = slow
        self.built: list[tuple[str, ...]] = []
        self._cost: dict[str, float] = {}

    def build(self, program: CompiledStages, pieces: Mapping[str, Any]) -> dict[str, Any]:
        self.built.append(tuple(pieces))
        side = "with" if len(self.built) % 2 else "without"
        for name, graph in pieces.items():
            names = [node.op if not node.results[0].name.startswith(self.slow) else "slow" for node in graph.nodes]
            self._cost[f"{side} {name}"] = sum(10.0 if op == "slow" else 1.0 for op in names)
        return {name: lambda arguments: arguments for name in pieces}

    def time(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        for call in calls.values():
            call()
        return {name: self._cost[name] for name in calls}


def choose(fake: Fake, target: Target | None = None) -> Profit:
    return choose_by_time(stages(), PipelineOptions(), target or resolve_target("cpu"), fake.build, fake.time)


def test_a_fusion_that_is_slower_is_left_out_with_both_times() -> None:
    """Promise 9: only the pass that costs more on this machine; the report has the time with it and without it."""
    profit = choose(Fake(slow="qkv"))
    assert {choice.name for choice in profit.choices} == FUSIONS
    assert profit.left_out == ("fuse_qkv",)
    choice = next(choice for choice in profit.choices if not choice.kept)
    assert all(point.with_pass > point.without for point in choice.times)
    assert choice.reason.startswith("left out: ") and " without for 1 tokens" in choice.reason


def test_fusions_that_pay_stay() -> None:
    assert choose(Fake(slow="no such value")).left_out == ()


def test_only_pieces_that_differ_are_built() -> None:
    """Compile time stays bounded: of the pieces that a fusion changes only those that layers share are compiled for it."""
    fake = Fake(slow="qkv")
    choose(fake)
    assert fake.built == [("layer",)] * 2 * len(FUSIONS)


def test_times_count_as_often_as_the_program_calls_a_piece() -> None:
    """The llama of three layers calls its middle piece twice."""
    fake = Fake(slow="qkv")
    choice = next(choice for choice in choose(fake).choices if choice.name == "fuse_gate_up")
    costs = {name.removeprefix("with "): cost for name, cost in fake._cost.items() if name.startswith("with ")}
    assert choice.times[0].with_pass == 2 * costs["layer"]


@pytest.mark.exhaustive
def test_what_is_left_out_is_left_out_of_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 8: the program, the settings and the report agree, and the choice says who made it."""

    def time(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        return {name: 2.0 if name.startswith("with ") else 1.0 for name in calls}

    monkeypatch.setattr(compile_module, "choose_by_time", partial(choose_by_time, timer=time))
    monkeypatch.setattr(compile_module, "compile_natives", lambda *given, **named: {})
    save_model("llama", tmp_path / "tiny")
    made = compile_module.compile(
        tmp_path / "tiny", tmp_path / "b", store=tmp_path / "store", level=3, backend="eager", max_num_batched_tokens=64,
        disabled_passes=("fuse_qkv",),
    )  # fmt: skip
    bundle = open_bundle(made)
    row = next(row for row in bundle.manifest.settings if row.field == "disabled_passes")
    assert (row.source, row.asked) == ("measured", ["fuse_qkv"])
    assert row.value == ["fuse_qkv", "fuse_add_rms_norm", "fuse_gate_up"]
    assert "fuse_gate_up left out: 4e+03 ms with it and 2e+03 ms without" in row.reason
    assert not FUSIONS & set(bundle.manifest.pipeline)
    report = json.loads(bundle.file("reports/profit.json").read_bytes())
    assert [choice["kept"] for choice in report["choices"]] == [False, False]


def test_another_target_is_not_measured_and_says_why() -> None:
    here = resolve_target("cpu")
    other = next(target for target in TARGETS.values() if target != here)
    profit = choose(Fake(slow="qkv"), other)
    assert profit.choices == () and other.name in profit.reason and here.name in profit.reason


def test_disabled_passes_are_not_measured() -> None:
    fake, without = Fake(slow="qkv"), ("fuse_qkv",)
    profit = choose_by_time(
        stages(without), PipelineOptions(without=without), resolve_target("cpu"), fake.build, fake.time
    )
    assert {choice.name for choice in profit.choices} == FUSIONS - {"fuse_qkv"}


def test_rounds_interleave() -> None:
    """Every round runs each call once, after one of each that is not timed."""
    order: list[str] = []
    times = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 4 and set(times) == {"a", "b"}


@pytest.mark.parametrize(("most", "counts"), [(2048, [1, 16, 256]), (20, [1, 16]), (1, [1])])
def test_counts_fit_the_bundle(most: int, counts: list[int]) -> None:
    assert usable_counts(most) == counts
