"""Other code generators through the same seam, from compile to greedy tokens: TVM, and a toy that needs two table rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.reference import Reference
from tests.models import save_model
from treadle import LLM, SamplingParams
from treadle.codegen import backends, loader
from treadle.codegen.backend_eager import EagerBackend
from treadle.codegen.backends import BACKENDS, PieceJob
from treadle.codegen.bundle import open_bundle
from treadle.codegen.compile import compile as compile_model
from treadle.codegen.explain import explain_compile
from treadle.codegen.loader import FORMATS, Artifact, load_ir, load_pieces
from treadle.codegen.store import Store
from treadle.ir.registry import Registry

CALLS: list[int] = []


class ToyBackend(EagerBackend):
    """IR text, backwards."""

    name = "toy"
    format = "backwards"
    suffix = ".txt"

    def options(self) -> dict[str, Any]:
        return {"direction": "backwards"}

    def build(self, job: PieceJob, out: Path) -> None:
        out.write_text(job.ir[::-1])


def load_backwards(path: Path) -> Artifact:
    turned = path.with_name(f"{path.stem}.turned")
    turned.write_text(path.read_text()[::-1])
    artifact = load_ir(turned)
    turned.unlink()

    def call(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        CALLS.append(len(arguments))
        return artifact(arguments)

    return call


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two rows more, in tables of this test alone."""
    here = f"{__name__}:"
    with_toy = Registry("codegen backend", {name: BACKENDS._targets[name] for name in BACKENDS})
    with_toy.register("toy", f"{here}ToyBackend")
    formats = Registry("artifact format", {name: FORMATS._targets[name] for name in FORMATS})
    formats.register("backwards", f"{here}load_backwards")
    monkeypatch.setattr(backends, "BACKENDS", with_toy)
    monkeypatch.setattr(loader, "FORMATS", formats)
    yield


@pytest.mark.slow
def test_a_third_backend_needs_two_rows_and_nothing_else(toy: None, tmp_path: Path, store: Path) -> None:
    """C09-05: compile, store, bundle, verify, load and run, with a backend that nothing in the tree has heard of."""
    save_model("llama", tmp_path / "model")
    made = compile_model(
        tmp_path / "model", tmp_path / "toy.bundle", store=store, backend="toy", max_num_batched_tokens=32
    )
    bundle = open_bundle(made)
    ranges = [item for piece in bundle.manifest.pieces for item in piece.ranges]
    assert {(item.format, Path(item.file).suffix) for item in ranges} == {("backwards", ".txt")}
    CALLS.clear()
    with LLM(str(made)) as llm:
        output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert len(output[0].outputs[0].token_ids) == 3 and CALLS
    assert load_pieces(bundle)


@pytest.mark.skipif(find_spec("tvm") is None, reason="needs TVM: pip install 'treadle[tvm]'")
@pytest.mark.exhaustive
def test_a_model_answers_as_transformers_and_the_eager_backend(tmp_path: Path, store: Path) -> None:
    """Issue 3: a second backend through the same seam, from compile to greedy tokens; its artifacts are found again."""
    model = save_model("llama", tmp_path / "model")
    settings = {"dtype": "float32", "max_num_batched_tokens": 64, "store": store}
    prompts = [[5, 17, 200, 33], [7], list(range(3, 40))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = {}
    for backend in ("tvm", "eager"):
        made = compile_model(tmp_path / "model", tmp_path / f"{backend}.bundle", backend=backend, **settings)
        with LLM(str(made)) as llm:
            answers[backend] = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    bundle = open_bundle(tmp_path / "tvm.bundle")
    assert {item.format for piece in bundle.manifest.pieces for item in piece.ranges} == {"tvm"}
    assert all(answer.hit for answer in explain_compile(bundle.root, {}, Store(store)))
    assert answers["tvm"] == answers["eager"]
    for prompt, answer in zip(prompts, answers["tvm"], strict=True):
        assert Reference(model).first_difference(prompt, answer) is None
