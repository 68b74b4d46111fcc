"""The table of tolerances for whole models: logprobs of a model in a dtype against transformers in float32."""

from __future__ import annotations

# dtype -> (largest difference of a logprob among the likely tokens, mean of it). A bfloat16 model rounds to 8 bits
# after every op: transformers' own bfloat16 differs from its float32 by as much (the tests show it).
LOGPROBS = {"float32": (2e-3, 2e-4), "bfloat16": (0.35, 0.06)}
