"""`treadle passes` and `treadle ops`: everything there is, documented from its source, whatever a plugin does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from treadle.ir.graph import Graph
from treadle.ir.ops.registry import dialect
from treadle.ir.plugins import Plugin
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.registry import PASSES
from treadle.server import commands_ops, commands_passes


@dataclass(frozen=True)
class _Documented(Pass):
    """Does nothing, in words of its own."""

    name: ClassVar[str] = "documented"
    tier: ClassVar[Tier] = "exact"
    requires: ClassVar[tuple[str, ...]] = ("rope",)
    scheme: str
    bits: int | None = None

    def run(self, graph: Graph) -> PassReport:
        return self.report()


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass with options, and one of a package that does not load."""
    broken = Plugin("treadle.passes", "broken", "no_such_module:Broken", "broken-passes", "3.1")
    monkeypatch.setattr(PASSES, "_targets", {**PASSES._targets, "documented": f"{__name__}:_Documented"})
    monkeypatch.setattr(PASSES, "plugins", lambda: {"broken": broken})


def test_every_pass_is_listed_with_its_words(added: None) -> None:
    """Those of the pipeline first; one that cannot be loaded has its reason and hides nothing."""
    rows = json.loads(CliRunner().invoke(commands_passes.app, ["--json"]).stdout)
    assert [row["name"] for row in rows][:2] == ["canonicalise", "drop_batch_dim"]
    by_name = {row["name"]: row for row in rows}
    assert set(by_name) == set(PASSES.names())
    assert all(row["doc"] and row["from"] == "tree" for row in rows if "error" not in row)
    assert by_name["broken"]["from"] == "broken-passes 3.1" and "no_such_module" in by_name["broken"]["error"]
    lines = CliRunner().invoke(commands_passes.app, []).stdout.splitlines()
    assert len(lines) == len(rows) and any(line.startswith("documented{scheme,bits}") for line in lines)


def test_a_pass_is_explained(added: None) -> None:
    """Options with type and default, and what it requires."""
    told = CliRunner().invoke(commands_passes.app, ["documented"]).stdout
    for words in ("in words of its own", "requires rope", "scheme: str (required)", "bits: int | None = null", "stage fuse"):
        assert words in told
    assert "Gives matrix products" in CliRunner().invoke(commands_passes.app, ["raise_linear"]).stdout
    assert "choose one of" in str(CliRunner().invoke(commands_passes.app, ["nothing"]).exception)


def test_every_op_is_listed_and_explained() -> None:
    rows = json.loads(CliRunner().invoke(commands_ops.app, ["--json"]).stdout)
    assert set(dialect()) <= {row["name"] for row in rows} and all(row["doc"] for row in rows)
    assert "Writes cache" in CliRunner().invoke(commands_ops.app, ["attention"]).stdout
    assert "aten::add.Tensor" in CliRunner().invoke(commands_ops.app, ["aten.add.Tensor"]).stdout
