"""The inductor backend: packages equal to the references at every boundary, for the stated target, from a clean place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from treadle.codegen.backend_inductor import InductorBackend
from treadle.codegen.backends import PieceJob, make_backend
from treadle.codegen.inductor_worker import export_piece
from treadle.codegen.loader import load_aoti, load_ir
from treadle.codegen.ranges import TokenRange
from treadle.codegen.target import resolve_target
from treadle.codegen.torch_private import CHECKED_VERSIONS, compiling_for, private, vector_isa
from treadle.ir.errors import ArtifactError
from treadle.ir.graph import Graph
from treadle.ir.hashing import canonical_text
from treadle.ir.text import parse_graph

LAYER = """graph @layer(T in 1..64) {
  input %attn: f32[T,4,16]
  input %res: f32[T,64]
  input %cos: f32[T,16]
  input %sin: f32[T,16]
  param %ow: f32[64,64] = load("o")
  param %n1: f32[64] = load("n1")
  param %gw: f32[192,64] = load("g")
  param %dw: f32[64,96] = load("d")
  param %n2: f32[64] = load("n2")
  param %qkv: f32[128,64] = load("q")
  %x: f32[T,64] = aten.view.default(%attn, size=[T, 64])
  %o: f32[T,64] = linear(%x, %ow)
  %h1: f32[T,64] = aten.add.Tensor(%res, %o)
  %y1: f32[T,64] = rms_norm(%h1, %n1, eps=1e-05)
  %g: f32[T,192] = linear(%y1, %gw)
  %ga, %up: f32[T,96], f32[T,96] = split(%g, sizes=[96, 96])
  %act: f32[T,96] = gated_act(%ga, %up, act="silu")
  %d: f32[T,64] = linear(%act, %dw)
  %h: f32[T,64] = aten.add.Tensor(%h1, %d)
  %y: f32[T,64] = rms_norm(%h, %n2, eps=1e-05)
  %q: f32[T,128] = linear(%y, %qkv)
  %a, %b, %c: f32[T,64], f32[T,32], f32[T,32] = split(%q, sizes=[64, 32, 32])
  %aq: f32[T,4,16] = aten.view.default(%a, size=[T, 4, 16])
  %bk: f32[T,2,16] = aten.view.default(%b, size=[T, 2, 16])
  %cv: f32[T,2,16] = aten.view.default(%c, size=[T, 2, 16])
  %rq: f32[T,4,16] = rope(%aq, %cos, %sin)
  %rk: f32[T,2,16] = rope(%bk, %cos, %sin)
  return %rq, %rk, %cv, %h
}
"""


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InductorBackend]:
    """Made with an unusable HOME and secrets in the environment, which must not matter."""
    scratch = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/nonexistent")
        patch.setenv("TREADLE_API_KEY", "s3cret")
        made = make_backend("inductor", resolve_target("cpu"), scratch, 1)
        yield made
        made.close()


@pytest.fixture(scope="module")
def package(backend: InductorBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = set(Path(tempfile.gettempdir()).glob("torchinductor_*"))
    out = tmp_path_factory.mktemp("package") / "data"
    job = PieceJob(name="layer", ir=canonical_text(parse_graph(LAYER)), range=TokenRange(1, 64))
    backend.build(job, out)
    assert set(Path(tempfile.gettempdir()).glob("torchinductor_*")) == before
    return out


def arguments(graph: Graph, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    return [torch.randn(value.type.at(tokens)) * 0.3 for value in (*graph.inputs, *graph.params)]  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 63, 64])
def test_a_package_equals_the_references(package: Path, tmp_path: Path, tokens: int) -> None:
    """C09-01, C09-11 (R-9.27): one dynamic package, at every boundary and at 1; outputs are contiguous."""
    graph = parse_graph(LAYER)
    given = arguments(graph, tokens)
    (tmp_path / "ir").write_text(LAYER)
    expected = load_ir(tmp_path / "ir")(list(given))
    found = load_aoti(package)(list(given))
    for want, have in zip(expected, found, strict=True):
        assert have.is_contiguous() and have.shape == want.shape
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_package_holds_no_place_no_secret_and_no_source(package: Path) -> None:
    """Acceptance 8"""
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
        content = b"".join(archive.read(name) for name in names)
    assert not [name for name in names if name.endswith(".cpp")]
    for word in (b"s3cret", b"/nonexistent", sys.prefix.encode(), tempfile.gettempdir().encode() + b"/"):
        assert word not in content, word


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_code_uses_the_registers_of_its_target(package: Path, tmp_path: Path) -> None:
    """TRAP-22: code for AVX2 has 256-bit registers and none of 512 bits, whatever the build machine has."""
    with zipfile.ZipFile(package) as archive:
        library = next(name for name in archive.namelist() if name.endswith(".so"))
        (tmp_path / "piece.so").write_bytes(archive.read(library))
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(tmp_path / "piece.so")], capture_output=True, text=True, check=True
    ).stdout
    bits = resolve_target("cpu").vector_bits
    assert ("%ymm" in text) == (bits >= 256) and ("%zmm" in text) == (bits >= 512)
    assert not re.search(r"\b(bextr|blsr|rorx|mulx|pdep|tzcnt)\b", text), "instructions the target does not list"


@pytest.mark.slow
def test_a_package_loads_in_a_process_without_compiler_or_inductor(package: Path) -> None:
    """Acceptance 5"""
    code = (
        "import sys, torch; from pathlib import Path; from treadle.codegen.loader import load_aoti;"
        "load_aoti(Path(sys.argv[1])); print({'torch._inductor', 'transformers'} & set(sys.modules))"
    )
    environment = {"PATH": "/nonexistent", "HOME": "/nonexistent", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code, str(package)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.slow
def test_a_failed_compile_names_piece_and_range_and_the_next_one_works(backend: InductorBackend, tmp_path: Path) -> None:
    """C09-05, C09-12"""
    bad = LAYER.replace("%h1: f32[T,64] = aten.add.Tensor(%res, %o)", "%h1: f32[T,64] = aten.add.Tensor(%res, %qkv)")
    with pytest.raises(ArtifactError, match="piece broken for 1-64 tokens failed"):
        backend.build(PieceJob(name="broken", ir=bad, range=TokenRange(1, 64)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", [1, 2, 64])
def test_export_is_static_for_an_exact_size_and_dynamic_for_an_interval(end: int) -> None:
    """C09-09 (R-9.21, R-9.22)"""
    graph = parse_graph(LAYER)
    program = export_piece(graph, 1, end)
    shape = next(node for node in program.graph.nodes if node.op == "placeholder").meta["val"].shape
    assert isinstance(shape[0], torch.SymInt) == (end > 2)
    if end == 64:
        given = arguments(graph, 5)
        for want, have in zip(export_piece(graph, 5, 5).module()(*given), program.module()(*given), strict=True):
            torch.testing.assert_close(have, want)


def test_a_settings_scope_is_undone_even_on_errors() -> None:
    """R-9.15"""
    from torch._inductor import config, cpu_vec_isa

    before = (config.cpp.simdlen, cpu_vec_isa.valid_vec_isa_list)
    with pytest.raises(RuntimeError), compiling_for("avx2", {"cpp.simdlen": 256}, precompiled_headers=False):
        assert config.cpp.simdlen == 256 and str(cpu_vec_isa.pick_vec_isa()) == "avx2"
        raise RuntimeError
    assert (config.cpp.simdlen, cpu_vec_isa.valid_vec_isa_list) == before


def test_an_instruction_set_is_not_probed_and_not_extended() -> None:
    """TRAP-22: what the build machine has beyond the target must not slip in."""
    assert vector_isa("avx512").build_arch_flags() == "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma"
    assert bool(vector_isa("avx512")) and not vector_isa("portable")


def test_an_unknown_setting_is_refused() -> None:
    with (
        pytest.raises(ArtifactError, match="no setting cpp.no_such"),
        compiling_for("avx2", {"cpp.no_such": 1}, precompiled_headers=False),
    ):
        pass


def test_a_torch_without_what_we_need_is_refused_by_name() -> None:
    with pytest.raises(ArtifactError, match=r"has no torch._C._aoti.NoSuchLoader.*checked with torch"):
        private("torch._C._aoti", "NoSuchLoader")
    assert any(torch.__version__.startswith(version) for version in CHECKED_VERSIONS)


def test_every_private_name_exists_in_this_torch() -> None:
    for module, name in (
        ("torch._C._aoti", "AOTIModelPackageLoader"),
        ("torch._inductor", "aoti_compile_and_package"),
        ("torch._inductor.cpu_vec_isa", "valid_vec_isa_list"),
        ("torch._inductor.cpu_vec_isa", "VecAVX2"),
        ("torch._inductor.cpu_vec_isa", "VecAVX512"),
        ("torch._inductor.codecache", "_precompile_header"),
    ):
        assert private(module, name) is not None
