"""The commands of docs/how-to/debug-a-pass.md run as they stand and print what the page shows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.test_docs import ROOT, blocks
from treadle.passes.registry import PASSES
from treadle.server.cli import app

PAGE = ROOT / "docs" / "how-to" / "debug-a-pass.md"


def commands() -> Iterator[tuple[str, str]]:
    """(command line, what the page shows of its output); the trace of a real model is left to other tests."""
    for body in blocks(PAGE, "console"):
        for part in body.removeprefix("$ ").split("\n$ "):
            line, _, shown = part.partition("\n")
            if not line.startswith("treadle trace"):
                yield line, shown


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The two files of the page, `broken.ir` made as it says."""
    (text,) = blocks(PAGE, "text")
    (tmp_path / "mlp.ir").write_text(text)
    lines = [line for line in text.splitlines(keepends=True) if "%s:" not in line]
    (tmp_path / "broken.ir").write_text("".join(lines).replace("(%s, %u)", "(%g, %u)"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "shown"), list(commands()))
def test_command_prints_what_the_page_shows(folder: Path, line: str, shown: str) -> None:
    """C14-12: every part of the output between dots is there, in order."""
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    rest = result.stdout
    for part in filter(str.strip, shown.split("...")):
        _, found, rest = rest.partition(part.strip("\n"))
        assert found, f"not in the output, or not in this order:\n{part}\nin\n{result.stdout}"


def test_the_page_shows_output() -> None:
    """The check above has something to compare, and the passes are known."""
    assert len(list(commands())) == 6 and all(shown.strip(". \n") for _, shown in commands())
    assert {"raise_linear", "raise_gated_act", "fuse_gate_up"} <= set(PASSES.names())
