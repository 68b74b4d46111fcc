"""The table of passes, the language in which they are asked for, and the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.harness import traced
from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph
from treadle.passes import registry
from treadle.passes.base import STAGES, Pass, PassReport, Tier, run_passes
from treadle.passes.library.fuse_add_rms_norm import FuseAddRmsNorm
from treadle.passes.library.raise_rms_norm import RaiseRmsNorm
from treadle.passes.order import ordered
from treadle.passes.pipeline import PipelineOptions, known_passes, plan_pipeline, run_pipeline
from treadle.passes.registry import make_pass, parse_passes, pass_table

TIDY = ("canonicalise", "eliminate_dead_code")
"""Passes that run in more than one stage."""


@dataclass(frozen=True)
class _Idle(Pass):
    """Changes nothing; has an option of every kind."""

    name: ClassVar[str] = "idle"
    tier: ClassVar[Tier] = "exact"
    number: int = 1
    ratio: float = 0.5
    words: str = ""
    mode: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    limit: int | None = None
    on: bool = False

    def run(self, graph: Graph) -> PassReport:
        return self.report()


def _pass(name: str, **declared: object) -> Pass:
    """An idle pass with these ClassVars."""
    return type(name, (_Idle,), {"name": name, **declared})()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """`idle`, and passes that declare where they belong, are in the table for one test."""
    monkeypatch.setattr(registry.PASSES, "_targets", dict(registry.PASSES._targets))
    monkeypatch.setattr(registry.PASSES, "_loaded", dict(registry.PASSES._loaded))
    for step in (
        _Idle(),
        _pass("late", stage="lower", requires=("idle",)),
        _pass("early", stage="clean", after=("fuse_qkv",)),
        _pass("first", after=("second",)),
        _pass("second", requires=("first",)),
        _pass("needs_rope", requires=("rope",)),
        _pass("needs_nothing_known", requires=("moon",)),
    ):
        registry.PASSES.register(step.name, type(step))


def test_the_table_holds_every_pass_of_the_pipeline() -> None:
    """Each row's class has the row's name and one of the four stages, and the stage is where the pipeline runs it."""
    table = pass_table()
    assert set(known_passes()) <= set(table)
    plan = plan_pipeline(PipelineOptions())
    for stage in STAGES:
        assert {step.stage for step in plan[stage] if step.name not in TIDY} == {stage}


def test_the_written_order_agrees_with_what_passes_declare() -> None:
    """Ordering the pipeline by requires and after changes nothing."""
    plan = plan_pipeline(PipelineOptions())
    steps = [step for stage in STAGES for step in plan[stage] if step.name not in TIDY]
    assert ordered(steps) == steps


def test_options_are_read(known: None) -> None:
    """Every kind of value arrives with its type, and white space does not matter."""
    text = 'canonicalise, idle{number=2 , ratio=1, words="a,{}=b", mode="b", sizes=[1,2], limit=null, on=true}'
    first, second = parse_passes(text)
    assert first.name == "canonicalise"
    assert second == _Idle(2, 1, "a,{}=b", "b", (1, 2), None, True)


@given(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.lists(st.integers()), st.booleans()
)
def test_a_pass_prints_as_it_is_read(number: int, ratio: float, words: str, sizes: list[int], on: bool) -> None:
    """`spec` is the inverse of `parse_passes`."""
    step = _Idle(number, ratio, words, "b", tuple(sizes), None, on)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "pass_class", lambda name: _Idle)
        assert parse_passes(step.spec()) == [step]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "position 0: expected the name of a pass, found the end"),
        ("canonicalise,", "position 13: expected the name of a pass, found the end"),
        ("canonicalise idle", "position 13: expected a comma before the next pass, or the end, found 'i'"),
        ("idle,wrong{a=1}", "position 5: unknown pass 'wrong'; choose one of: .*canonicalise"),
        ("idle{colour=1}", "position 0: pass 'idle' has no option 'colour'; it takes: number \\(int\\), ratio \\(float\\)"),
        ("canonicalise{a=1}", "has no option 'a'; it takes none"),
        ("idle{number}", "position 11: expected = and a value, found '}'"),
        ("idle{number=}", 'position 12: expected a value: a number, "text", true, false, null'),
        ("idle{words=text}", "position 11: expected a value"),
        ("idle{number={}}", "position 12: expected a value"),
        ("idle{number=1,number=2}", "position 14: option 'number' is given twice"),
        ("idle{number=1", "expected a comma before the next option, or }, found the end"),
        ("idle{number=true}", "number=True should be int"),
        ('idle{mode="c"}', "mode='c' should be .*'a', 'b'"),
    ],
)
def test_errors_say_where_and_what_may_stand_there(known: None, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_passes(text)


def test_a_row_must_be_a_pass_of_its_own_name(known: None) -> None:
    registry.PASSES.register("graph", Graph)
    with pytest.raises(ConfigError, match=r"pass 'graph' .*not a subclass"):
        make_pass("graph")
    registry.PASSES.register("other", _Idle)
    with pytest.raises(ConfigError, match=r"_Idle is listed as pass 'other' but calls itself 'idle'"):
        make_pass("other")
    registry.PASSES.register("lost", type(_pass("lost", stage="nowhere")))
    with pytest.raises(ConfigError, match=r"stage 'nowhere'; choose one of: clean, raise, fuse, lower"):
        make_pass("lost")


def test_extra_passes_stand_at_the_end_of_their_stage(known: None) -> None:
    """Also at level 0; their options are in the pipeline's description, which the artifact keys hold."""
    stages = run_pipeline(traced("llama"), PipelineOptions(extra_passes=("late,idle{number=3}",)))
    ran = stages.pipeline()
    assert ran.index("fuse_gate_up") < ran.index("idle{number=3}") < ran.index("select_logit_rows") < ran.index("late")
    bare = run_pipeline(traced("llama"), PipelineOptions(level=0, extra_passes=("idle",))).pipeline()
    assert "idle" in bare and "fuse_qkv" not in bare


@pytest.mark.parametrize(
    ("extra", "level", "words"),
    [
        (("first,second",), 2, "first after second after first|second after first after second"),
        (("needs_nothing_known",), 2, "'needs_nothing_known' requires 'moon', which has not run"),
        (("needs_rope",), 0, "'needs_rope' requires 'rope', which has not run"),
        (("late",), 2, "'late' requires 'idle', which has not run"),
        (("early",), 2, "'early' .stage clean. must come after 'fuse_qkv', which runs in stage fuse"),
        (("idle", "idle{number=2}"), 2, "'idle' is asked for twice"),
    ],
)
def test_an_order_that_cannot_be_had_names_the_passes(known: None, extra: tuple[str, ...], level: int, words: str) -> None:
    """Cycles, missing requirements, a stage that is too early, and twins are refused before anything runs."""
    with pytest.raises(ConfigError, match=words):
        plan_pipeline(PipelineOptions(level=level, extra_passes=extra))


def test_a_requirement_may_be_what_a_pass_produces(known: None) -> None:
    """`requires=("rope",)` is met by raise_rope, which produces that op."""
    assert "needs_rope" in [step.name for step in plan_pipeline(PipelineOptions(extra_passes=("needs_rope",)))["fuse"]]


def test_the_runner_checks_requirements() -> None:
    """With a known past every requirement must be met; without one, only the order of the list counts."""
    needy = _pass("needy", requires=("raise_rms_norm",))
    graph = traced("llama")
    with pytest.raises(ConfigError, match=r"'needy' requires 'raise_rms_norm', which has not run"):
        run_passes(graph, [needy], done=())
    with pytest.raises(ConfigError, match=r"'needy' requires 'raise_rms_norm', which runs later"):
        run_passes(graph, [needy, RaiseRmsNorm()])
    assert [report.name for report in run_passes(graph, [needy])] == ["needy"]
    assert len(run_passes(graph, [RaiseRmsNorm(), needy], done=())) == 2


def test_a_pass_that_should_have_matched_warns() -> None:
    """The warning names the nearest miss, where there is one; passes that matched, or need not, say nothing."""

    class Expecting(FuseAddRmsNorm):
        expects: ClassVar[bool] = True

    graph = traced("llama")
    (quiet,), (loud,) = run_passes(graph, [FuseAddRmsNorm()]), run_passes(graph, [Expecting()])
    assert quiet.warning == "" and "fuse_add_rms_norm was expected to match and found nothing" in loud.warning
    assert loud.as_dict()["warning"] == loud.warning
    (asked,) = run_passes(graph, [FuseAddRmsNorm()], asked=["fuse_add_rms_norm"])
    assert asked.warning


def test_no_architecture_of_the_main_job_warns() -> None:
    """What the pipeline expects to match does match."""
    for name in ("llama", "gpt2", "gemma3", "mixtral"):
        assert not [report.warning for report in run_pipeline(traced(name)).reports if report.warning]
