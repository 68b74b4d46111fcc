"""Compiles a module of one's own into a bundle and generates from it: `python examples/compile_module.py OUTPUT`.

Such a module takes input_ids [T] and positions [T], returns logits [T, V], and calls attention through `attend`,
which gives each layer its KV cache. It has no tokenizer, so prompts are token ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import treadle
from treadle import LLM, SamplingParams
from treadle.ir.trace_interfaces import attend

VOCAB, WIDTH, HEADS = 64, 32, 4


class Block(nn.Module):
    """One attention layer with a residual."""

    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = self.qkv(self.norm(x)).reshape(-1, 3 * HEADS, WIDTH // HEADS).split(HEADS, dim=1)
        return x + self.out(attend(q, k, v, layer=self.layer).reshape(-1, WIDTH))


class TinyModel(nn.Module):
    """Two blocks between an embedding and a projection to the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids and positions i64 [T] -> logits [T, V]."""
        x = self.tokens(input_ids) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(output: str) -> None:
    """Prints where the bundle is and eight generated ids."""
    torch.manual_seed(0)
    bundle: Path = treadle.compile(TinyModel(), output, max_model_len=256, max_num_batched_tokens=64, force=True)
    with LLM(bundle) as llm:
        answer = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=8))[0]
        print(bundle, answer.outputs[0].token_ids)


if __name__ == "__main__":
    main(sys.argv[1])
