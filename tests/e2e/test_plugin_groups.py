"""A package with a code generator and its file format, a native library and an attention backend, used by a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest

import treadle
from tests.ir.test_plugins import Install, install  # noqa: F401 - a fixture
from tests.models import save_model
from treadle import LLM, SamplingParams
from treadle.codegen.bundle import open_bundle
from treadle.ir.errors import BundleError, ConfigError

pytestmark = pytest.mark.slow

MODULE = '''
from pathlib import Path
from tempfile import NamedTemporaryFile

from treadle.codegen.backend_eager import EagerBackend
from treadle.codegen.loader import load_ir
from treadle.kernels.attention.torch_reference import TorchAttentionBackend
from treadle.kernels.native import NativeSource, TranslationUnit

NATIVE_SOURCE = "doubling"
DOUBLING = NativeSource(name="doubling", units=(TranslationUnit(file="doubling.cpp"),), folder=Path(__file__).parent)
MADE = []


class Reversed(EagerBackend):
    name = format = "reversed"
    suffix = ".rev"

    def build(self, job, out):
        super().build(job, out)
        out.write_text(out.read_text()[::-1])


def load_reversed(path):
    with NamedTemporaryFile("w", suffix=".ir") as file:
        file.write(path.read_text()[::-1])
        file.flush()
        return load_ir(Path(file.name))


class Doubled(TorchAttentionBackend):
    """Halves the scale in Python and doubles it in C, so that nothing comes out right without the library."""

    name = "doubled"

    @classmethod
    def make_impl(cls, *, scale, native=None, **options):
        import ctypes

        double = native.bind("double_it", [ctypes.c_double], ctypes.c_double)
        MADE.append(double(scale / 2))
        return super().make_impl(scale=double(scale / 2), native=native, **options)
'''
LIBRARY = """
#include <stdint.h>
extern "C" __attribute__((visibility("default"))) int64_t treadle_abi_version() { return 1; }
extern "C" __attribute__((visibility("default"))) double double_it(double x) { return 2 * x; }
"""


def test_every_group_of_a_compile_and_a_run(install: Install, tmp_path: Path, store: Path) -> None:  # noqa: F811
    """C13-01: codegen_backends, artifact_formats and kernels (attention and native): same tokens as treadle's own."""
    model = save_model("llama", tmp_path / "model")
    settings = {"store": store, "dtype": "float32", "max_num_batched_tokens": 64}
    plain = treadle.compile(tmp_path / "model", tmp_path / "plain.bundle", backend="eager", **settings)
    source = install(
        "elsewhere",
        "elsewhere",
        MODULE,
        codegen_backends={"reversed": "elsewhere:Reversed"},
        artifact_formats={"reversed": "elsewhere:load_reversed"},
        kernels={"attention.doubled": "elsewhere:Doubled", "native.doubling": "elsewhere:DOUBLING"},
    )
    (tmp_path / "doubling.cpp").write_text(LIBRARY)
    theirs = treadle.compile(tmp_path / "model", tmp_path / "theirs.bundle", backend="reversed", **settings)
    assert model.config.model_type == "llama" and plain != theirs

    manifest = open_bundle(tmp_path / "theirs.bundle", for_loading=False).manifest
    assert {entry.format for piece in manifest.pieces for entry in piece.ranges} == {"reversed"}
    assert "doubling" in {entry.name for entry in manifest.native}
    assert [entry.name for entry in manifest.plugins] == ["elsewhere"]

    def tokens(bundle: str, **options: object) -> list[list[int]]:
        asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        with LLM(tmp_path / bundle, num_blocks=16, **options) as llm:
            return [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [300, 2]], asked, use_tqdm=False)]

    wanted = tokens("plain.bundle")
    assert tokens("theirs.bundle", attention_backend="doubled") == wanted
    import elsewhere  # type: ignore[import-not-found]

    assert elsewhere.MADE and all(scale == elsewhere.MADE[0] for scale in elsewhere.MADE)
    with pytest.raises(ConfigError, match=r"no native library 'doubling'"):
        tokens("plain.bundle", attention_backend="doubled")
    source.write_text(MODULE + "\n# other\n")
    from tests.ir.test_plugins import _forget

    _forget()
    with pytest.raises(BundleError, match="elsewhere"):
        open_bundle(tmp_path / "theirs.bundle")
