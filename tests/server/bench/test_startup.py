"""`treadle bench startup` and `compile`: what they read and list. Seconds themselves are not asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.models import save_model
from tests.server.tiny_tokenizer import write_tokenizer
from treadle.codegen.compile import compile
from treadle.ir.errors import ConfigError, TreadleError
from treadle.server.bench.compiling import compile_lines, measure_compile
from treadle.server.bench.startup import (
    FIRST_TOKEN,
    ends,
    measure_startup,
    phase_rows,
    start_llm,
    startup_lines,
)
from treadle.server.cli import app

SMALL = {"level": 1, "backend": "eager", "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose vocabulary holds the small tokenizer's."""
    folder = tmp_path_factory.mktemp("startup") / "tiny"
    save_model("llama", folder, vocab_size=400)
    write_tokenizer(folder)
    return folder


def test_phases_are_read_from_a_log_in_the_order_of_time() -> None:
    """Other lines do not matter; of a phase that two processes end, the later end counts."""
    log = (
        "2026 DEBUG treadle.runtime.start_phases: start phase 'b c' ended at 103.500000\n"
        "start phase 'a' ended at 101.000000\nsomething else\nstart phase 'b c' ended at 102.000000\n"
    )
    assert ends(log, 100.0) == {"a": 1.0, "b c": 3.5}
    assert list(ends(log, 100.0)) == ["a", "b c"]


def test_a_phase_takes_the_time_since_the_one_before() -> None:
    rows = phase_rows([{"a": 1.0, "b": 3.0, "extra": 4.0}, {"a": 2.0, "b": 3.0}])
    assert [(row["phase"], row["seconds"]["median"], row["ends_at"]["median"]) for row in rows] == [("a", 1.5, 1.5), ("b", 1.5, 3.0)]


def test_a_process_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(TreadleError, match=r"exit code 1: .*nothing-here"):
        start_llm(str(tmp_path / "nothing-here"))


def test_unknown_kinds_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "startup", "no.bundle", "--kind", "fast"])
    assert isinstance(result.exception, ConfigError) and "not one of: llm, serve" in str(result.exception)


@pytest.mark.slow
def test_a_start_lists_its_phases(model: Path, tmp_path: Path) -> None:
    """Issue 4: process start to ready and to first token, every phase named, beside the imports alone."""
    bundle = compile(model, tmp_path / "b", store=tmp_path / "store", **SMALL)
    results = measure_startup(str(bundle), 1, ["llm", "serve"])
    for kind in ("llm", "serve"):
        phases = [row["phase"] for row in results[kind]["phases"]]
        told = ["open bundle", "import torch and the engine", "load kernels", "load pieces", "load weights", "build the runner"]
        assert [phase for phase in phases if phase in told] == told
        assert phases[-2:] == ["ready", FIRST_TOKEN]
        points = [row["ends_at"]["median"] for row in results[kind]["phases"]]
        assert points == sorted(points) and results[kind]["to_first_token_seconds"]["median"] == points[-1]
    assert results["import torch"]["count"] == 1 and len(startup_lines(results)) > 20


@pytest.mark.slow
def test_a_compile_is_timed_cold_and_from_its_store(model: Path, tmp_path: Path) -> None:
    """Issue 5: every stage has its seconds; the second compile builds nothing."""
    output = tmp_path / "r.json"
    settings = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    result = CliRunner().invoke(app, ["bench", "compile", str(model), *settings, "--output", str(output)])
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    cold, warm = report["results"]["cold"], report["results"]["warm"]
    assert cold["artifacts_compiled"] > 0 and cold["artifacts_from_store"] == 0
    assert warm["artifacts_compiled"] == 0 and warm["artifacts_from_store"] == cold["artifacts_compiled"]
    assert {"trace", "passes", "compile pieces", "write bundle"} <= set(cold["stages_seconds"]) == set(warm["stages_seconds"])
    assert report["effective"]["backend"] == "eager" and report["settings"]["model"] == "tiny"
    assert "trace" in result.output and str(model.parent) not in output.read_text()


@pytest.mark.slow
def test_a_cold_compile_ignores_the_users_store(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filled store of the user's makes nothing faster, and is not written to."""
    monkeypatch.setenv("TREADLE_STORE", str(tmp_path / "users"))
    results = measure_compile(str(model), SMALL, warm=False)
    assert set(results) == {"cold"} and not (tmp_path / "users").exists()
    assert compile_lines(results)[0].split() == ["stage", "cold,", "s"]
