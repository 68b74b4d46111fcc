"""The commands that work on a graph's text: opt and bisect on a file alone, trace on a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.models import save_model
from treadle.ir.errors import TreadleError
from treadle.ir.graph import Graph
from treadle.ir.text import parse_graph, print_graph
from treadle.server.cli import app

TRACED = Path(__file__).parent.parent / "golden" / "traced"
SMALL = """graph @small(T in 1..64) {
  input %x: f32[T,4]
  param %a: f32[4,4] = load("a")
  param %b: f32[4,4] = load("b")
  %g: f32[T,4] = aten.linear.default(%x, %a)   // mlp.gate | model.py:3
  %u: f32[T,4] = aten.linear.default(%x, %b)   // mlp.up | model.py:4
  %s: f32[T,4] = aten.silu.default(%g)   // mlp.act | model.py:5
  %y: f32[T,4] = aten.mul.Tensor(%s, %u)   // mlp | model.py:6
  return %y
}
"""


def treadle(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.ir"
    path.write_text(SMALL)
    return path


def test_opt_prints_the_result(small: Path) -> None:
    """Without another wish the rewritten text is the output, and it is a graph."""
    result = treadle("opt", small, "--passes", "raise_linear,raise_gated_act")
    assert result.exit_code == 0, result.output
    graph = parse_graph(result.stdout)
    assert [node.op for node in graph.nodes] == ["linear", "linear", "gated_act"]
    assert treadle("opt", small).stdout == SMALL


def test_opt_runs_both_graphs(small: Path) -> None:
    """--run prints shape, digest and statistics, and compares with the graph as read: exact passes keep every bit."""
    result = treadle("opt", small, "--passes", "raise_linear,raise_gated_act", "--run", "--tokens", 5)
    assert re.search(r"float32\[5, 4\]  sha256 [0-9a-f]{12}  min \S+, mean \S+, max \S+\n", result.stdout)
    assert "against the graph as read: bitwise equal" in result.stdout
    fused = treadle("opt", small, "--pipeline", "--run", "--tokens", 5)
    assert re.search(r"against the graph as read: (bitwise equal|%select_rows differs by \S+e-0[789] )", fused.stdout)
    assert "choose from 1 to 64" in str(treadle("opt", small, "--run", "--tokens", 65).exception)


def test_opt_shows_difference_steps_and_reports(small: Path, tmp_path: Path) -> None:
    """--diff, --print-after-all and --reports each print their part; -o writes the result."""
    out = tmp_path / "out.ir"
    result = treadle("opt", small, "--passes", "raise_linear,raise_rms_norm", "--diff", "--reports", "--print-after-all", "-o", out)
    assert result.exit_code == 0, result.output
    assert "-  %g: f32[T,4] = aten.linear.default(%x, %a)" in result.stdout
    assert "// after raise_linear\ngraph @small" in result.stdout and "// after raise_rms_norm" not in result.stdout
    assert re.search(r"raise_linear +2 +0  linear 2\n", result.stdout)
    assert re.search(r"raise_rms_norm +0 +0\n +warning: raise_rms_norm was expected to match", result.stdout)
    assert print_graph(parse_graph(out.read_text())) == out.read_text()


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (SMALL, ["--passes", "raise_lienar"], "unknown pass 'raise_lienar'"),
        (SMALL, ["--passes", "raise_linear", "--pipeline"], "either --passes or --pipeline"),
        (SMALL.replace("silu", "sulu"), [], r"small.ir: line 7: unknown op 'aten.sulu.default'"),
        (SMALL.replace("[T,4] = aten.silu", "[T,5] = aten.silu"), ["--pipeline"], r"declared as f32\[T,5\]"),
        (SMALL + "program @p(T in 1..64) {\n}\n", [], "this is a program over pieces"),
    ],
)
def test_wrong_files_and_passes(small: Path, text: str, arguments: list[str], message: str) -> None:
    """One error for the user, with the file and the line, or the choices."""
    small.write_text(text)
    error = treadle("opt", small, *arguments).exception
    assert isinstance(error, TreadleError) and re.search(message, str(error))


def edited(folder: Path, architecture: str, place: str, op: str) -> Path:
    """The traced text with one op taken out by hand: its line is gone, and who read it reads its first operand."""
    lines = (TRACED / f"{architecture}-f32.ir").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if f"= {op}(" in line and f"// {place} |" in line)
    match = re.match(r"\s*%([\w.]+): .*? = [\w.]+\(\[?%([\w.]+)", lines[at])
    assert match is not None
    text = "\n".join(re.sub(rf"%{re.escape(match[1])}(?![\w.])", f"%{match[2]}", line) for line in lines[:at] + lines[at + 1 :])
    path = folder / "edited.ir"
    path.write_text(text + "\n")
    return path


@pytest.mark.parametrize(
    ("name", "place", "op", "matches", "near_miss", "predicate"),
    [
        (
            "raise_rms_norm", "model.layers.1.input_layernorm", "aten.rsqrt.default", 6,
            r"aten\.add\.Tensor\(%mean\S*, other=1e-06\)   // model\.layers\.1\.input_layernorm \| modeling_llama\.py:66",
            "expected aten.rsqrt.default, found aten.add.Tensor",
        ),
        (
            "raise_rope", "model.layers.1.self_attn", "aten.neg.default", 5,
            r"aten\.slice\.Tensor\(.*   // model\.layers\.1\.self_attn \| modeling_llama\.py:249",
            "expected aten.neg.default, found aten.slice.Tensor",
        ),
        (
            "raise_gated_act", "model.layers.1.mlp.act_fn", "aten.silu.default", 2,
            r"aten\.mul\.Tensor\(.*   // model\.layers\.1\.mlp \| modeling_llama\.py:164",
            "neither factor is an activation",
        ),
        (
            "fuse_add_rms_norm", "model.layers.1", "aten.add.Tensor", 4,
            r"rms_norm\(%add\S* %model\.layers\.1\.input_layernorm\.weight.*   // model\.layers\.1\.input_layernorm",
            "goes through more than one norm",
        ),
    ],
)  # fmt: skip
def test_an_op_removed_by_hand_is_named(
    tmp_path: Path, name: str, place: str, op: str, matches: int, near_miss: str, predicate: str
) -> None:
    """Acceptance 2: the report of the fusion shows a match fewer, the node where it stopped, and the failed predicate."""
    text = (TRACED / "llama-f32.ir").read_text()
    if f"// {place} | " not in text:
        place = place.rpartition(".")[0]
    result = treadle("opt", edited(tmp_path, "llama", place, op), "--pipeline", "--reports")
    assert result.exit_code == 0, result.output
    report = re.search(rf"^  {name} +(\d+).*\n((?:      .*\n)*)", result.stdout, re.M)
    assert report is not None and int(report[1]) == matches
    assert re.search(rf"near miss: .*{near_miss}", report[2]), report[2]
    assert predicate in report[2]


def test_bisect_clears_the_pipeline_on_a_file() -> None:
    """Each pass has its line; the exit code is 0 when none is wrong."""
    result = treadle("bisect", TRACED / "gpt2-f32.ir")
    assert result.exit_code == 0, result.output
    assert "no pass changes the outputs beyond the tolerance" in result.stdout
    assert re.search(r"raise_addmm +12  bitwise equal", result.stdout)


def test_bisect_names_a_pass_beyond_the_tolerance(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, the pass, the output and the change of the text."""
    from treadle.passes.library import raise_gated_act

    rules = tuple(
        raise_gated_act.Rule(rule.kind, rule.pattern, raise_gated_act._with("relu"), rule.where) for rule in raise_gated_act.RULES[:1]
    )
    monkeypatch.setattr(raise_gated_act, "RULES", rules)
    result = treadle("bisect", small, "--passes", "raise_linear,raise_gated_act,eliminate_dead_code")
    assert result.exit_code == 1
    assert "first wrong pass: 2 raise_gated_act (exact)" in result.stdout
    assert re.search(r"%gated_act differs by \d", result.stdout)
    assert "\n+  %gated_act: f32[T,4] = gated_act(%" in result.stdout and "act='relu'" in result.stdout
    assert "eliminate_dead_code" not in result.stdout


def test_bisect_takes_a_model(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not a file of text is traced, in the element type asked for."""
    asked: list[tuple[str, dict[str, object]]] = []

    def trace_model(model: str, **settings: object) -> Graph:
        asked.append((model, settings))
        return parse_graph(small.read_text())

    monkeypatch.setattr("treadle.codegen.compile.trace_model", trace_model)
    assert treadle("bisect", "tiny", "--dtype", "bfloat16").exit_code == 0
    assert treadle("bisect", "tiny", "--passes", "raise_linear").exit_code == 0
    assert asked == [("tiny", {"dtype": "bfloat16"}), ("tiny", {})]


@pytest.mark.slow
def test_trace_writes_what_opt_reads(tmp_path: Path) -> None:
    """A traced model, folded on the way, is a file that runs through the whole pipeline to the same bits."""
    save_model("llama", tmp_path / "tiny")
    path = tmp_path / "tiny.ir"
    result = treadle("trace", tmp_path / "tiny", "-o", path, "--dtype", "float32", "--max-num-batched-tokens", 99, "--fold")
    assert result.exit_code == 0, result.output
    assert "(T in 1..99) {" in path.read_text() and "  repeat i in 0..2 {" in path.read_text()
    assert "bitwise equal" in treadle("opt", path, "--pipeline", "--run").stdout
