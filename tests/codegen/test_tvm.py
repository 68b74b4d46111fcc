"""The TVM backend: libraries equal to the references at every boundary, refusals by name.

Skipped where TVM is not installed, but for the test of what is said then.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.codegen.test_inductor import LAYER
from tests.kernels.tolerance import assert_close
from treadle.codegen import tvm_runtime
from treadle.codegen.backends import Backend, PieceJob, make_backend
from treadle.codegen.loader import Artifact, load_artifact
from treadle.codegen.ranges import TokenRange
from treadle.codegen.target import resolve_target
from treadle.ir.errors import ArtifactError, ConfigError
from treadle.ir.graph import Graph
from treadle.ir.hashing import canonical_text
from treadle.ir.interpret import run
from treadle.ir.text import parse_graph

needs_tvm = pytest.mark.skipif(find_spec("tvm") is None, reason="needs TVM: pip install 'treadle[tvm]'")

SEVERAL = """graph @several(T in 1..64) {
  input %ids: i64[T]
  input %positions: i64[T]
  input %x: f32[T,24]
  input %q: f32[T,8,6]
  input %c: f32[T,4]
  input %s: f32[T,4]
  param %table: f32[40,24] = load("t")
  param %n: f32[24] = load("n")
  param %w: f32[48,24] = load("w")
  param %b: f32[48] = load("b")
  %e: f32[T,24] = embedding(%table, %ids)
  %p: i64[T,1] = aten.reshape.default(%positions, shape=[T, 1])
  %f: f32[T,1] = aten.to.dtype(%p, dtype=f32)
  %cos: f32[T,1] = aten.cos.default(%f)
  %sin: f32[T,1] = aten.sin.default(%f)
  %y: f32[T,24] = rms_norm(%x, %n, eps=1e-06, offset=1.0, scale_in_f32=True)
  %l: f32[T,48] = linear(%x, %w, %b)
  %r: f32[T,8,6] = rope(%q, %c, %s, interleaved=True)
  %g: f32[T,24] = gated_act(%x, %e, act="silu")
  %h, %t: f32[T,24], f32[T,24] = add_rms_norm(%x, %e, %n, eps=1e-05)
  return %e, %cos, %sin, %y, %l, %r, %g, %h, %t
}
"""

ELEMENTS = """graph @elements(T in 1..64) {
  input %x: f32[T,30]
  param %n: f32[30] = load("n")
  param %b: f32[30] = load("b")
  %l: f32[T,30] = layer_norm(%x, %n, %b, eps=1e-05)
  %cube: f32[T,30] = aten.pow.Tensor_Scalar(%l, exponent=3.0)
  %capped: f32[T,30] = aten.div.Tensor(%cube, other=3.0)
  %t: f32[T,30] = aten.tanh.default(%capped)
  %g: f32[T,30] = gated_act(%t, %l, act="gelu_tanh")
  %e: f32[T,30] = gated_act(%l, %x, act="gelu")
  %s: f32[T,30] = aten.softmax.int(%e, dim=-1)
  %sum: f32[T,1] = aten.sum.dim_IntList(%g, dim=[1], keepdim=True)
  %d: f32[T,30] = aten.sub.Tensor(%s, %sum)
  %joined: f32[T,60] = aten.cat.default([%d, %g], dim=1)
  return %joined
}
"""

PIECES = {
    "layer": (LAYER, "f32"),
    "elements": (ELEMENTS, "f32"),
    "several": (SEVERAL, "f32"),
    "several in bfloat16": (SEVERAL, "bf16"),
    "several in float16": (SEVERAL, "f16"),
}
"""Name -> text in float32, and the dtype that stands for float32. In the short ones each op's result is an output: it is
rounded once more than the reference, as the table of tolerances has it."""


def piece(name: str) -> Graph:
    text, dtype = PIECES[name]
    return parse_graph(text.replace("f32[", f"{dtype}["))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Made with an unusable HOME and secrets in the environment, which must not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/nonexistent")
        patch.setenv("TREADLE_API_KEY", "s3cret")
        made = make_backend("tvm", resolve_target("cpu"), tmp_path_factory.mktemp("scratch"), 2)
        yield made
        made.close()


@pytest.fixture(scope="module")
def libraries(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("libraries")
    for number, name in enumerate(PIECES):
        job = PieceJob(name=name, ir=canonical_text(piece(name)), range=TokenRange(1, 64))
        backend.build(job, folder / str(number))
    return {name: folder / str(number) for number, name in enumerate(PIECES)}


def arguments(graph: Graph, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    made = []
    for value in (*graph.inputs, *graph.params):
        shape, dtype = value.type.at(tokens), value.type.dtype.torch  # type: ignore[union-attr]
        whole = dtype is torch.int64
        made.append(torch.randint(0, 40, shape) if whole else (torch.randn(shape) * 0.3).to(dtype))
    return made


def check(name: str, artifact: Artifact, given: list[torch.Tensor]) -> None:
    """Against the reference in float32, on the same inputs."""
    exact = parse_graph(PIECES[name][0])
    wide = [tensor.float() if tensor.is_floating_point() else tensor for tensor in given]
    expected = run(exact, wide[: len(exact.inputs)], wide[len(exact.inputs) :])
    for want, have, value in zip(expected, artifact(list(given)), piece(name).outputs, strict=True):
        assert have.is_contiguous() and have.shape == want.shape
        assert have.dtype == value.type.dtype.torch  # type: ignore[union-attr]
        assert_close(have, want)


@needs_tvm
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 3, 63, 64, 2048])
@pytest.mark.parametrize("name", list(PIECES))
def test_a_library_equals_the_references(libraries: dict[str, Path], name: str, tokens: int) -> None:
    """C09-01, C09-11 (R-9.27): one dynamic library at every boundary, at 1, and far beyond."""
    check(name, load_artifact(libraries[name], "tvm"), arguments(piece(name), tokens))


@needs_tvm
@pytest.mark.slow
def test_weights_may_be_mapped_at_any_address(libraries: dict[str, Path]) -> None:
    """Vector code that takes alignment for granted ends the process."""
    given = []
    for tensor in arguments(parse_graph(LAYER), 5):
        shifted = torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
        assert shifted.data_ptr() % 64
        given.append(shifted)
    check("layer", load_artifact(libraries["layer"], "tvm"), given)


@needs_tvm
@pytest.mark.slow
def test_an_exact_size_and_a_replaced_file(
    backend: Backend, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """C09-09: code for exactly three tokens takes no others; a file put in another's place is not mistaken for it."""
    place = tmp_path / "piece.so"
    place.write_bytes(libraries["elements"].read_bytes())
    load_artifact(place, "tvm")
    place.unlink()
    backend.build(
        PieceJob(name="layer", ir=canonical_text(parse_graph(LAYER)), range=TokenRange(3, 3)), place
    )
    artifact = load_artifact(place, "tvm")
    check("layer", artifact, arguments(parse_graph(LAYER), 3))
    with pytest.raises((ValueError, RuntimeError), match="4 vs. 3"):
        artifact(arguments(parse_graph(LAYER), 4))


@needs_tvm
@pytest.mark.slow
def test_what_has_no_code_is_refused_by_op_and_place(backend: Backend, tmp_path: Path) -> None:
    """C09-05: no other backend steps in."""
    text = """graph @gate(T in 1..64) {
  input %x: f32[T,8]
  %best, %ids: f32[T,2], i64[T,2] = aten.topk.default(%x, k=2)
  return %best, %ids
}
"""
    job = PieceJob(name="gate", ir=text, range=TokenRange(1, 64), sources=("model.gate | modeling.py:7",))
    with pytest.raises(
        ArtifactError, match=r"piece gate.*no code for aten.topk.default at `%best.*modeling.py:7"
    ):
        backend.build(job, tmp_path / "out")
    bad = text.replace("aten.topk.default(%x, k=2)", "aten.pow.Tensor_Scalar(%x, exponent=0.5)")
    bad = bad.replace("%best, %ids: f32[T,2], i64[T,2]", "%best: f32[T,8]").replace("%best, %ids", "%best")
    with pytest.raises(ArtifactError, match=r"aten.pow.Tensor_Scalar at .*only squares and cubes"):
        backend.build(PieceJob(name="roots", ir=bad, range=TokenRange(1, 64)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_tvm
@pytest.mark.slow
def test_a_library_holds_no_place_and_no_secret(libraries: dict[str, Path]) -> None:
    content = libraries["layer"].read_bytes()
    for word in (b"s3cret", b"/nonexistent", sys.prefix.encode(), b"/tmp/"):
        assert word not in content, word


@needs_tvm
@pytest.mark.slow
def test_a_library_loads_with_the_runtime_alone(libraries: dict[str, Path]) -> None:
    """Acceptance 5: on the serve path there is no compiler, TVM's own included."""
    code = (
        "import sys; from pathlib import Path; from treadle.codegen.loader import load_artifact;"
        "load_artifact(Path(sys.argv[1]), 'tvm');"
        "maps = open('/proc/self/maps').read();"
        "print({'tvm', 'torch._inductor', 'transformers'} & set(sys.modules), 'libtvm_compiler' in maps)"
    )
    environment = {"PATH": "/nonexistent", "HOME": "/nonexistent", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(libraries["layer"])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "set() False", done.stderr


@needs_tvm
@pytest.mark.slow
def test_a_library_of_another_version_is_refused(
    libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tvm_runtime, "installed_versions", lambda: "apache-tvm 0.1")
    with pytest.raises(ArtifactError, match=r"made with apache-tvm 0.*and apache-tvm 0.1 is installed"):
        load_artifact(libraries["layer"], "tvm")


@needs_tvm
@pytest.mark.slow
def test_a_damaged_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "piece.so").write_bytes(b"no machine code")
    with pytest.raises(ArtifactError, match=r"TVM cannot load piece.so"):
        load_artifact(tmp_path / "piece.so", "tvm")


def test_without_tvm_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(tvm_runtime, "version", missing)
    with pytest.raises(
        ConfigError, match=r"apache-tvm, which is not installed; pip install 'treadle\[tvm\]'"
    ):
        make_backend("tvm", resolve_target("cpu"), tmp_path, 1)
    with pytest.raises(ConfigError, match="'treadle\\[tvm\\]'"):
        load_artifact(tmp_path / "piece.so", "tvm")
