"""Tracing: dtypes, sources of other kinds, and what happens to models that cannot be traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ir.families import VOCAB, make_model
from treadle.ir.errors import ModelError, TraceError
from treadle.ir.interpret import run
from treadle.ir.loader import load_params
from treadle.ir.source import open_source
from treadle.ir.trace import trace
from treadle.ir.trace_interfaces import MaskNote, Notes, attend, check_masks
from treadle.ir.types import DType


def logits(graph: Any, source: Any, ids: Tensor) -> Tensor:
    params = [value for _, value in load_params(graph.params, source)]
    state = [None] * (len(graph.inputs) - 2)
    with torch.no_grad():
        return run(graph, [ids, torch.arange(len(ids)), *state], params)[0]


def test_bf16_keeps_the_float32_casts(llama: tuple[Path, Any]) -> None:
    """A bf16 trace holds the casts to float32 of its norms and equals the bf16 model, the float attention apart."""
    source = open_source(llama[0])
    graph = trace(source, dtype="bf16")
    casts = [node.attrs["dtype"] for node in graph.nodes if node.op == "aten.to.dtype"]
    assert casts.count(DType("f32")) >= 5 and casts.count(DType("bf16")) >= 5
    frequencies = next(p for p in graph.params if p.name.endswith("inv_freq"))
    assert str(frequencies.type.dtype) == "f32"  # type: ignore[union-attr]
    ids = torch.arange(5, 20)
    model = make_model("llama").to(torch.bfloat16)
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(graph, source, ids), expected, atol=0.05, rtol=0.02)


def test_float32_has_no_casts_that_cast_nothing(llama: tuple[Path, Any]) -> None:
    graph = trace(open_source(llama[0]))
    values = [(node.operand("self"), node.result) for node in graph.nodes if node.op == "aten.to.dtype"]
    assert all(given is not None and given.type != made.type for given, made in values)


def test_transformers_module_as_source() -> None:
    """A model object is traced from its class and configuration; its state_dict is the checkpoint."""
    model = make_model("qwen3")
    source = open_source(model)
    ids = torch.arange(3, 12)
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(trace(source), source, ids), expected, atol=1e-4, rtol=0)


class Plain(nn.Module):
    """A model of the user's own: one attention layer, a scale that lives in a buffer."""

    def __init__(self, choose: bool = False, layers: tuple[int, ...] = (0,)):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.inner = Inner(choose)
        self.layers = layers
        self.register_buffer("scale", torch.tensor([0.5, 2.0]), persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale.sum()
        for layer in self.layers:
            heads = x.unflatten(-1, (2, 8))
            x = x + attend(heads, heads, heads, layer=layer).flatten(1)
        return self.inner(x)


class Inner(nn.Module):
    def __init__(self, choose: bool):
        super().__init__()
        self.choose = choose
        self.out = nn.Linear(16, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        if self.choose and x.sum() > 0:  # the line that the error must name
            x = x * 2
        return self.out(x)


def test_plain_module_as_source() -> None:
    """A module of the user's own, buffers included, weights unread while tracing."""
    source = open_source(Plain().eval())
    graph = trace(source)
    assert {str(p.recipe) for p in graph.params} >= {'load("scale")', 'load("embed.weight")'}
    ids = torch.tensor([3])  # with one token, attention gives back its value: the result is known
    model = source.module  # type: ignore[attr-defined]
    x = model.embed(ids) * 2.5
    torch.testing.assert_close(logits(graph, source, ids), model.inner.out(x + x))


def test_data_dependent_choice_is_named() -> None:
    """The error names construct, file and line, module path and remedy."""
    with pytest.raises(TraceError, match="depends on the values of a tensor") as caught:
        trace(open_source(Plain(choose=True)))
    message = str(caught.value)
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "error must name" in text
    )
    assert f"test_trace.py:{line}" in message and "in module inner" in message and "torch.where" in message


def test_two_attentions_of_one_layer_are_refused() -> None:
    with pytest.raises(TraceError, match=r"more than once for layer \[0\]"):
        trace(open_source(Plain(layers=(0, 0))))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (
            "BloomConfig",
            {"n_layer": 2},
            r"mask itself.*modeling_bloom.py:\d+ in module transformer.h.0.self_attention",
        ),
        ("FalconConfig", {"num_hidden_layers": 2}, r"a table of its own.*modeling_falcon.py:\d+"),
        ("MambaConfig", {"num_hidden_layers": 2, "state_size": 4}, r"MambaMixer, .*modeling_mamba.py:\d+.*keep state between"),
    ],
)
def test_attention_beside_the_interface_is_refused(
    config: str, settings: dict[str, Any], message: str
) -> None:
    """Never a silent dense fallback: it would mix the sequences of a batch."""
    import transformers

    kind = getattr(transformers, config)
    heads = {} if config == "MambaConfig" else {"num_attention_heads": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        kind(vocab_size=64, hidden_size=32, **heads, **settings)
    )
    with pytest.raises(TraceError, match=message):
        trace(open_source(model))


def test_mask_of_another_rule_is_refused() -> None:
    """A chunked mask says window 4 like a sliding one; its rule tells them apart."""

    def chunked(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // 4 == query // 4)

    def sliding(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - 4)

    check_masks(Notes([MaskNote(4, sliding)]), "Good")
    with pytest.raises(TraceError, match="rule of its own"):
        check_masks(Notes([MaskNote(4, chunked)]), "Odd")
    with pytest.raises(TraceError, match="rule of its own"):
        check_masks(Notes([MaskNote(5, sliding)]), "Off by one")


def test_quantized_checkpoint_is_refused(llama: tuple[Path, Any]) -> None:
    source = open_source(llama[0])
    source.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelError, match="gptq"):
        trace(source)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 4.0},
            r"depends on the values of a tensor.*modeling_rope_utils\.py:\d+",
        ),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
            "(?s)changes its own buffers|reduces over the tokens",
        ),
    ],
)
def test_frequencies_that_depend_on_the_batch_are_refused(rope: dict[str, Any], message: str) -> None:
    """Rotary scalings that look at the longest position would let one request change another's numbers."""
    model = make_model("llama", rope_parameters={"rope_theta": 1e4, **rope})
    with pytest.raises(TraceError, match=message):
        trace(open_source(model))


class Mixing(nn.Module):
    """Lets all tokens of a step see one another: the requests of a batch would, too."""

    def __init__(self, by_mean: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.by_mean = by_mean

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + attend(*[x.unflatten(-1, (2, 8))] * 3, layer=0).flatten(1)
        x = x - x.mean(0) if self.by_mean else x @ x.T @ x
        return x @ self.embed.weight.T


@pytest.mark.parametrize(
    ("by_mean", "message"), [(True, "reduces over the tokens"), (False, "pairs tokens with tokens")]
)
def test_tokens_may_meet_in_attention_only(by_mean: bool, message: str) -> None:
    with pytest.raises(TraceError, match=rf"{message}.*test_trace\.py:\d+"):
        trace(open_source(Mixing(by_mean)))


def test_module_without_attention_is_refused() -> None:
    with pytest.raises(TraceError, match="never calls"):
        trace(open_source(Plain(layers=())))
