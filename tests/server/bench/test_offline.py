"""`treadle bench latency` and `throughput`: what is run and counted. Speed itself is not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.runtime.toy_model import toy_config
from treadle.ir.errors import ConfigError
from treadle.runtime.engine.llm import LLM
from treadle.server.bench.offline import OfflineLoad, effective, measure
from treadle.server.bench.report import make_report
from treadle.server.bench.tables import offline_lines
from treadle.server.cli import app


def test_every_repeat_generates_what_was_asked_for() -> None:
    load = OfflineLoad(input_len=7, output_len=5, num_prompts=3, warmup=1, repeats=2)
    with LLM.from_config(toy_config()) as llm:
        results = measure(llm, load)
        stats = llm.stats()
        report = make_report("latency", {}, results, effective=effective(llm))
    assert (results["input_tokens"], results["output_tokens"]) == (2 * 3 * 7, 2 * 3 * 5)
    assert stats.generation_tokens == 3 * 3 * 5, "the warm-up runs, and is not counted"
    assert results["seconds"]["count"] == 2 and results["ttft_ms"]["count"] == results["tpot_ms"]["count"] == 6
    seconds = results["readings_seconds"]
    assert results["output_tokens_per_second"]["max"] == pytest.approx(15 / min(seconds), rel=1e-3)
    assert json.loads(json.dumps(report))["effective"]["model"]["max_model_len"] == 256
    assert len(offline_lines(results)) == 7


def test_lengths_are_spread_around_what_was_asked_for() -> None:
    load = OfflineLoad(input_len=20, output_len=4, num_prompts=20, spread=0.5, warmup=0, repeats=1)
    with LLM.from_config(toy_config()) as llm:
        results = measure(llm, load)
        again = measure(llm, load)
    assert results["input_tokens"] != 20 * 20 and 20 * 10 <= results["input_tokens"] <= 20 * 30
    assert again["input_tokens"] == results["input_tokens"], "the seed makes it repeatable"


def test_a_load_that_cannot_fit_is_refused_before_it_runs() -> None:
    with LLM.from_config(toy_config()) as llm, pytest.raises(ConfigError, match="257 tokens exceed the 256"):
        measure(llm, OfflineLoad(input_len=250, output_len=7, num_prompts=1))


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    """Before a model is loaded: the bundle is not even looked at."""
    result = CliRunner().invoke(app, ["bench", "latency", "no.bundle", "--output", str(tmp_path / "no" / "r.json")])
    assert result.exit_code == 1 and "its folder does not exist" in str(result.exception)
