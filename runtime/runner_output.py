"""What the model runner gives back for one step. Plain lists: no tensor leaves the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.runtime.protocol import LogprobRow


@dataclass(slots=True)
class RunnerOutput:
    """Sampled tokens of one step, aligned with `req_ids` (any order, every scheduled request once).

    `sampled_token_ids[i]` is [] while the prompt of `req_ids[i]` is unfinished; else one token, or with drafts the
    accepted ones and one more. `logprobs[id]` has one row for each of those tokens.

    `prompt_logprobs[id]` holds the rows that became known in this step, in prompt order. A chunk that computes
    positions [a, b) of a prompt of P tokens gives the rows of tokens a+1 .. min(b, P-1), and the chunk with a = 0
    first gives None for token 0, which nothing predicts: P entries when the prompt is done.
    """

    req_ids: list[str] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[str, list[LogprobRow]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[LogprobRow | None]] = field(default_factory=dict)
