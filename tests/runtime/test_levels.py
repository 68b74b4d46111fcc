"""Optimization levels are defaults: a table of what each gives, and proof that anything asked for wins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from treadle.codegen.choose_passes import FUSIONS, pipeline_options
from treadle.codegen.config import LEVELS, resolve_compile
from treadle.ir.errors import ConfigError
from treadle.passes.pipeline import plan_pipeline
from treadle.runtime import levels
from treadle.runtime.dispatch import GRAPH_SETTINGS
from treadle.runtime.levels import ENGINE_DEFAULTS, resolve_engine


@pytest.fixture(autouse=True)
def bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of level 1."""
    opened = SimpleNamespace(manifest=SimpleNamespace(options={"level": 1}))
    monkeypatch.setattr(levels, "_open", lambda asked: opened)


def planned(**settings: Any) -> set[str]:
    """Names of the passes that a compile with these settings runs."""
    plan = plan_pipeline(pipeline_options(resolve_compile(settings).config))
    return {step.name for steps in plan.values() for step in steps}


def test_each_level_has_defaults_in_both_halves() -> None:
    """C14-01, R-14.1 to R-14.5: no graphs, piecewise, the most there is; level 3 is level 2 with measured choices."""
    assert tuple(ENGINE_DEFAULTS) == LEVELS
    modes = [resolve_engine({"bundle": "b", "level": level}).config.graph_mode for level in LEVELS]
    assert modes == ["none", "piecewise", "auto", "auto"]
    assert resolve_compile({}).config.level == 2
    assert [resolve_compile({"level": level}).config.backend for level in LEVELS] == ["eager"] + ["inductor"] * 3
    for setting in FUSIONS:
        assert [getattr(resolve_compile({"level": level}).config, setting) for level in LEVELS] == [False, False, True, True]


def test_the_engine_takes_the_level_of_its_bundle_unless_asked() -> None:
    """C14-01, R-14.1."""
    resolved = resolve_engine({"bundle": "b"})
    assert (resolved.config.level, resolved.config.graph_mode) == (1, "piecewise")
    assert (resolved.origins["level"].source, resolved.origins["graph_mode"].source) == ("bundle", "level 1")
    asked = resolve_engine({"bundle": "b", "level": 2})
    assert (asked.config.graph_mode, asked.origins["level"].source) == ("auto", "user")


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("mode", GRAPH_SETTINGS)
def test_what_the_user_sets_wins_over_every_level(level: int | None, mode: str) -> None:
    """C14-01, R-14.1: whatever the level, whatever the setting."""
    asked = {"bundle": "b", "graph_mode": mode} | ({} if level is None else {"level": level})
    resolved = resolve_engine(asked)
    assert resolved.config.graph_mode == mode and resolved.origins["graph_mode"].source == "user"
    assert resolved.asked["graph_mode"] == mode
    assert resolved.defaults["graph_mode"] == ENGINE_DEFAULTS[1 if level is None else level]["graph_mode"]


def test_an_unknown_level_is_refused_with_the_levels() -> None:
    with pytest.raises(ConfigError, match="level=4 is not one of: 0, 1, 2, 3"):
        resolve_engine({"bundle": "b", "level": 4})


@pytest.mark.parametrize("level", LEVELS)
def test_fusions_follow_the_level_and_the_user(level: int) -> None:
    """C14-01, R-14.2 to R-14.4: the fusions of a level are in its pipeline, and each one can be set by itself."""
    settings = {"level": level, "tensor_parallel_size": 2}
    if level:  # at level 0 no linear is raised, so nothing can be quantized
        settings["quantization"] = "int8"
    fused = planned(**settings) & {name for names in FUSIONS.values() for name in names}
    assert bool(fused) == (level >= 2)
    assert "fuse_all_reduce_rms_norm" in planned(**settings, fuse_all_reduce_norm=True)
    assert "fuse_all_reduce_rms_norm" not in planned(**settings, fuse_all_reduce_norm=False)
    if level:
        assert "fuse_gated_act_quant" in planned(**settings, fuse_act_quant=True)
        assert "fuse_rms_norm_quant" not in planned(**settings, fuse_norm_quant=False)
