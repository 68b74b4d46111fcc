"""`treadle verify` over a small model at -O0: what it proves, stores and blames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.server.tiny_bundle import compile_tiny
from treadle.codegen.bundle import open_bundle
from treadle.codegen.write_bundle import writing_bundle
from treadle.server.cli import app

pytestmark = pytest.mark.slow


def treadle(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny(tmp_path_factory.mktemp("verify"))


def test_a_right_bundle_is_proved_and_keeps_the_proof(bundle: Path) -> None:
    """Promise 9: passes and pieces are compared with the unrewritten graph, and the bundle keeps the result."""
    result = treadle("verify", bundle, "--shapes", "1,5", "--seed", 7)
    assert result.exit_code == 0, result.output
    assert "T=5" in result.output and "fuse_qkv" in result.output and "piece layer" in result.output
    opened = open_bundle(bundle)
    opened.verify()
    proof = json.loads(opened.file("reports/verify.json").read_bytes())
    assert (proof["ok"], proof["seed"], proof["shapes"]) == (True, 7, [1, 5])
    assert {check["kind"] for check in proof["checks"]} == {"pass", "all passes", "piece", "program"}
    assert "comparisons hold for 1, 5 tokens (seed 7)" in treadle("inspect", bundle).output


def test_a_piece_that_computes_something_else_is_blamed(bundle: Path, tmp_path: Path) -> None:
    """The artifact of `layer` multiplies its norm's epsilon; the IR of the bundle does not."""
    broken = tmp_path / "broken"
    opened = open_bundle(bundle)
    (piece,) = (entry for entry in opened.manifest.pieces if entry.name == "layer")
    wrong = opened.file(piece.ranges[0].file).read_text().replace("eps=1e-06", "eps=0.5")
    assert "eps=0.5" in wrong
    with writing_bundle(broken) as writer:
        for entry in opened.manifest.files:
            if entry.path != piece.ranges[0].file:
                writer.adopt(entry, opened.root / entry.path)
        writer.add_bytes(piece.ranges[0].file, wrong.encode())
        writer.finish(opened.manifest)
    before = (broken / "manifest.json").read_bytes()
    result = treadle("verify", broken, "--shapes", "3", "--no-store")
    assert result.exit_code == 1
    assert "treadle: piece layer changes the outputs for 3 tokens" in result.output
    assert "piece first" in result.output and before == (broken / "manifest.json").read_bytes()


@pytest.mark.parametrize(("shapes", "words"), [("0", "from 1 to 64"), ("65", "from 1 to 64"), ("a,b", "1,2,7,64")])
def test_shapes_that_cannot_be(bundle: Path, shapes: str, words: str) -> None:
    result = treadle("verify", bundle, "--shapes", shapes)
    assert result.exit_code == 1 and words in str(result.exception)


def test_a_bundle_of_other_passes_is_not_proved(bundle: Path, tmp_path: Path) -> None:
    """What this treadle's passes do says nothing about a bundle that other passes made."""
    other = tmp_path / "other"
    opened = open_bundle(bundle)
    with writing_bundle(other) as writer:
        for entry in opened.manifest.files:
            writer.adopt(entry, opened.root / entry.path)
        opened.manifest.pipeline.append("fuse_the_unknown")
        writer.finish(opened.manifest)
    result = treadle("verify", other)
    assert result.exit_code == 1 and "fuse_the_unknown" in str(result.exception)
