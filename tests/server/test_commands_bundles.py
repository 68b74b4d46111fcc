"""The commands compile, inspect and cache, over a small model at -O0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.models import save_model
from treadle.ir.errors import TreadleError
from treadle.server.cli import app

pytestmark = pytest.mark.slow


def treadle(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    return folder / "store"


@pytest.fixture(scope="module")
def compiled(folder: Path, store: Path) -> Result:
    save_model("llama", folder / "tiny")
    return treadle(
        "compile", folder / "tiny", "-o", folder / "b", "-O", 0, "--max-num-batched-tokens", 64, "--max-model-len", 999,
        "--store", store,
    )  # fmt: skip


@pytest.fixture
def bundle(compiled: Result, folder: Path) -> Path:
    assert compiled.exit_code == 0, compiled.output
    return folder / "b"


def test_compile_shows_each_stage_with_its_time_and_prints_the_path(compiled: Result, bundle: Path) -> None:
    """Acceptance 5: each stage's time listed."""
    assert compiled.stdout.strip().splitlines()[-1] == str(bundle)
    for stage in ("read config", "trace", "passes", "compile pieces", "native kernels", "write bundle"):
        assert f"\n{stage}" in "\n" + compiled.output
    assert "compile piece 4 of 4 (piece logits for 1-64 tokens)" in compiled.output


def test_print_config_shows_settings_and_compiles_nothing(bundle: Path, folder: Path) -> None:
    """C14-01, C14-02: of a compile and of a server; what the bundle cannot do is lowered with the reason."""
    shown = treadle("compile", folder / "tiny", "-O", 3, "--max-model-len", 9999, "--print-config")
    assert shown.exit_code == 0 and "the model has only" in shown.stdout and "CompileConfig" in shown.stdout
    assert not (folder / "tiny.bundle").exists()
    served = {line.split()[0]: line for line in treadle("serve", bundle, "--print-config").stdout.splitlines() if line}
    assert "level 0" in served["graph_mode"] and served["level"].split()[1:] == ["-", "0", "0", "bundle"]
    asked = treadle("serve", bundle, "--print-config", "-O", 2).stdout
    assert "is called through Python" in asked and "ServerConfig" in asked
    refused = treadle("serve", folder / "tiny", "--print-config")
    assert refused.exit_code == 1 and "treadle compile" in str(refused.exception)


def test_settings_say_who_chose_them(bundle: Path) -> None:
    """C09-02: only what was asked for on the command line came from the user."""
    rows = {row["field"]: row["source"] for row in json.loads(treadle("inspect", bundle, "--json").stdout)["settings"]}
    assert rows["level"] == rows["max_num_batched_tokens"] == "user"
    assert {rows[name] for name in ("target", "store_weights", "force", "jobs", "exact_sizes")} <= {"default", "platform"}


def test_inspect_prints_what_the_bundle_is(bundle: Path) -> None:
    """Acceptance 9: stages, passes with counts, pieces, dispatch, sizes, settings with reasons."""
    text = treadle("inspect", bundle).output
    assert "traced -> clean -> raised -> fused -> split -> unified" in text
    assert "canonicalise" in text and "layers 0 to 1" in text and "pieces/layer-1-64.ir" in text
    assert "1 to 64" in text and "cpu_attention" in text and " MB" in text
    assert "asked for 999: the model has only 256 positions" in text
    assert "asked for 'auto': the checkpoint is float32" in text


def test_inspect_as_json_and_as_ir(bundle: Path) -> None:
    summary = json.loads(treadle("inspect", bundle, "--json").output)
    assert summary["model"]["num_layers"] == 3 and summary["unlisted"] == []
    assert [piece["calls"] for piece in summary["pieces"]] == [1, 2, 1, 1]
    assert sum(report["matched"] for report in summary["passes"]) > 0
    assert treadle("inspect", bundle, "--ir", "traced").output.startswith("graph @llama(T in 1..64) {")
    assert "input %" in treadle("inspect", bundle, "--ir", "layer").output
    refused = treadle("inspect", bundle, "--ir", "nothing")
    assert refused.exit_code == 1 and "traced, clean" in str(refused.exception)


def test_cache_ls_verify_diff_gc(bundle: Path, store: Path) -> None:
    """Promise 7"""
    del bundle
    rows = json.loads(treadle("cache", "ls", "--store", store, "--json").output)
    pieces = [row for row in rows if row["label"].startswith("piece")]
    assert len(pieces) == 4 and "7 objects" in treadle("cache", "ls", "--store", store).output
    assert "7 of 7 objects are sound" in treadle("cache", "verify", "--store", store).output
    shown = treadle("cache", "diff", pieces[0]["digest"][:12], pieces[1]["digest"][:12], "--store", store).output
    assert shown.startswith("ir: ") and "never part of a key" in shown
    digest = pieces[0]["digest"]
    data = store / "objects" / digest[:2] / digest / "data"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    broken = treadle("cache", "verify", "--store", store)
    assert broken.exit_code == 1 and digest[:12] in broken.output
    assert "removed 1 objects" in treadle("cache", "gc", "--store", store).output
    assert "removed 6 objects" in treadle("cache", "gc", "--store", store, "--max-size", "0").output


def test_cache_explain_says_hit_or_miss_and_why(bundle: Path, folder: Path) -> None:
    """Acceptance 8"""
    kept = folder / "explained"
    assert treadle("compile", folder / "tiny", "-o", folder / "b2", "-O", 0, "--max-num-batched-tokens", 64, "--store", kept).exit_code == 0
    same = treadle("cache", "explain", bundle, "--store", kept).output
    assert same.count("hit") == 4 and "miss" not in same
    changed = treadle("cache", "explain", bundle, "--store", kept, "--set", "max_num_batched_tokens=128").output
    assert changed.count("miss") == 4 and "end: 64 -> 128" in changed
    idle = treadle("cache", "explain", bundle, "--store", kept, "--set", "max_model_len=100").output
    assert "note: max_model_len enters no key" in idle and "miss" not in idle


def test_errors_are_the_users_words(bundle: Path, folder: Path) -> None:
    for arguments, words in (
        (("compile", folder / "tiny", "-o", bundle, "-O", 0), "--force"),
        (("compile", folder / "nowhere", "-o", folder / "c", "-O", 0), "no model at"),
        (("inspect", folder), "not a bundle"),
        (("cache", "explain", bundle, "--set", "nonsense"), "NAME=VALUE"),
        (("cache", "gc", "--max-size", "lots"), "lots"),
    ):
        done = treadle(*arguments)
        assert done.exit_code == 1 and isinstance(done.exception, TreadleError), done.output
        assert words in str(done.exception)
