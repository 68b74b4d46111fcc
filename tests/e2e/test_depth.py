"""Layers are compiled once: the number of unique pieces does not depend on depth."""

from __future__ import annotations

import pytest
import torch

from treadle.ir.source import open_source
from treadle.ir.trace import trace
from treadle.passes.pipeline import run_pipeline

pytestmark = pytest.mark.slow


def smollm2_shaped(layers: int) -> torch.nn.Module:
    """SmolLM2-135M's shape with `layers` layers; its weights are memory that nobody filled."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model.to_empty(device="cpu")


def test_unique_pieces_do_not_grow_with_depth() -> None:
    """C09-11: 2, 30 and 60 layers give the same four pieces, by their structural hashes."""
    from treadle.ir.hashing import structural_hash

    pieces = {}
    for layers in (2, 30, 60):
        unified = run_pipeline(trace(open_source(smollm2_shaped(layers)))).unified
        pieces[layers] = {name: structural_hash(piece) for name, piece in unified.pieces.items()}
    assert pieces[2] == pieces[30] == pieces[60]
    assert list(pieces[2]) == ["first", "layer", "last", "logits"]
