"""Quantized compiles: perplexity against the unquantized model, sensible answers, fused equal to unfused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import treadle
from tests.e2e.perplexity import perplexity
from tests.e2e.tiny_model import save_tiny
from treadle import LLM, SamplingParams
from treadle.codegen.bundle import Bundle, open_bundle
from treadle.codegen.target import resolve_target
from treadle.ir.errors import ConfigError
from treadle.passes.quant.schemes import SCHEMES, scheme_passes

WITHIN = 1.02
DTYPE = "bfloat16" if resolve_target("cpu").isa == "avx512" else "float32"
"""Elsewhere products of bfloat16 are emulated, which takes many minutes."""
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
WORDS = "the small winter bridge and the house by the river in the morning"


@pytest.fixture(scope="module")
def plain_perplexity(store: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    output = tmp_path_factory.mktemp("plain") / "plain.bundle"
    treadle.compile("smollm2", output=output, store=store, dtype=DTYPE)
    with LLM(str(output)) as llm:
        return perplexity(llm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCHEMES.names())
def test_perplexity_of_the_real_model(
    name: str, store: Path, tmp_path: Path, plain_perplexity: float
) -> None:
    """Within 2 % of the unquantized model on a fixed text, and the capital of France is still Paris."""
    output = tmp_path / "q.bundle"
    treadle.compile("smollm2", output=output, store=store, dtype=DTYPE, quantization=name)
    with LLM(str(output)) as llm:
        found = perplexity(llm)
        answer = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0].text
    print(f"{name}: perplexity {found:.3f}, unquantized {plain_perplexity:.3f}")
    assert found <= WITHIN * plain_perplexity, (found, plain_perplexity)
    assert "Paris" in answer


def _compiled(folder: Path, store: Path, name: str, **settings: object) -> Bundle:
    output = folder / f"{name}.bundle"
    treadle.compile(str(folder / "model"), output=output, store=store, dtype="float32", **settings)  # type: ignore[arg-type]
    return open_bundle(output)


@pytest.mark.exhaustive
def test_a_small_model_in_int8(tmp_path: Path, store: Path) -> None:
    """Weights are stored in int8, compiled code equals the references, fusing changes no answer, and inspect shows it."""
    save_tiny(tmp_path / "model")
    plain = _compiled(tmp_path, store, "plain", backend="eager")
    fused = _compiled(tmp_path, store, "fused", quantization="int8")
    _compiled(tmp_path, store, "unfused", backend="eager", extra_passes=scheme_passes("int8")[:2])
    stored = {entry.name: entry.dtype for entry in fused.manifest.weights.tensors}
    quantized = [name for name, dtype in stored.items() if dtype == "i8"]
    assert len(quantized) == len([name for name in stored if name.endswith(".scale")]) > 0
    assert not any("lm_head" in name or "embed" in name for name in quantized)
    assert fused.manifest.options["quantization"] == "int8" and plain.manifest.options["quantization"] is None
    full, compiled, eager = (_logprobs(tmp_path / f"{name}.bundle") for name in ("plain", "fused", "unfused"))
    assert (compiled - eager).abs().max() < 2e-2, "compiled and fused against eager and unfused"
    assert 0 < (full - compiled).abs().max() < 0.5


@pytest.mark.slow
def test_attention_with_a_quantized_output(tmp_path: Path, store: Path) -> None:
    """A static scale lets attention give int8: the same bits as quantizing afterwards, through the whole runtime."""
    save_tiny(tmp_path / "model")
    steps = ("quantize_weights", 'quantize_activations{scales=["*o_proj*=0.05"]}')
    fused = _compiled(tmp_path, store, "fused", backend="eager", extra_passes=(*steps, "fuse_attention_quant"))
    _compiled(tmp_path, store, "unfused", backend="eager", extra_passes=steps)
    keys = [step.attrs["out_key"] for step in fused.manifest.program.steps if step.op == "attention"]
    assert keys and set(keys) == {"quant(i8, per_tensor)"}
    assert torch.equal(_logprobs(tmp_path / "fused.bundle"), _logprobs(tmp_path / "unfused.bundle"))


def _logprobs(bundle: Path) -> torch.Tensor:
    with LLM(str(bundle)) as llm:
        output = llm.generate([WORDS], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([row[token].logprob for token, row in pairs])


@pytest.mark.slow
def test_schemes_that_cannot_be_had(tmp_path: Path) -> None:
    """An unknown scheme lists the known; at level 0, which raises no linears, the reason names the missing pass."""
    with pytest.raises(ConfigError, match="int8_weight_only"):
        treadle.compile("smollm2", output=tmp_path / "b", quantization="int3")
    with pytest.raises(ConfigError, match="raise_linear"):
        treadle.compile("smollm2", output=tmp_path / "b", quantization="int8", level=0)
