"""The reference: a transformers model in float32, asked by teacher forcing what greedy decoding would choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TIE = 1e-4
"""A difference is excused only where the reference's two best logits lie this close (acceptance line 2)."""


@dataclass
class Reference:
    model: Any
    tokenizer: Any = None

    @staticmethod
    def smollm2() -> Reference:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        from treadle.ir.source import open_source

        path = Path(open_source("smollm2").location)
        load = {"gguf_file": path.name}
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **load
        )
        return Reference(model.eval(), AutoTokenizer.from_pretrained(path.parent, **load))

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, V] float32."""
        return self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()

    def first_difference(self, prompt: list[int], output: list[int]) -> str | None:
        """None if `output` is what greedy decoding gives after `prompt`; otherwise where and by how much not.

        Follows the output as given, so one forward pass answers for all its tokens. A token that is not the best
        one ends the comparison: without complaint if it is a tie, else with its description.
        """
        rows = self.logits(prompt + output)[len(prompt) - 1 : -1]
        for index, (row, token) in enumerate(zip(rows, output, strict=True)):
            best = int(row.argmax())
            if token == best:
                continue
            gap = float(row[best] - row[token])
            if gap <= TIE:
                return None
            return f"output token {index} is {token}, the reference has {best} (logit gap {gap:.2e})"
        return None
