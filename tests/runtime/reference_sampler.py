"""The sampler chain written once more in plain NumPy float64, one request at a time, to test ours against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.runtime.sampling_params import SamplingParams

ORDER = (
    "snapshot", "allowed", "bad_words", "min_tokens", "bias", "penalties",
    "greedy", "temperature", "min_p", "top_k", "top_p", "pick",
)  # fmt: skip


@dataclass
class State:
    """One row on its way through the chain."""

    logits: np.ndarray
    snapshot: np.ndarray | None = None
    greedy: int | None = None
    probs: np.ndarray | None = None


def softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a wrong order can leave nothing to choose from
        mass = np.exp(logits - logits.max())
    return mass / mass.sum()


def run_chain(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    order: Sequence[str] = ORDER,
) -> State:
    """Runs the stages in `order` and returns what each left behind."""
    stages = _stages(params, prompt, output)
    state = State(logits.astype(np.float64).copy())
    for name in order:
        stages[name](state)
    return state


def _stages(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> dict[str, Callable[[State], None]]:
    def snapshot(state: State) -> None:
        state.snapshot = np.log(np.maximum(softmax(state.logits), 1e-300))

    def allowed(state: State) -> None:
        if params.allowed_token_ids is not None:
            forbidden = np.setdiff1d(np.arange(len(state.logits)), params.allowed_token_ids)
            state.logits[forbidden] = -np.inf

    def bad_words(state: State) -> None:
        for *prefix, last in params.bad_words_token_ids:
            if not prefix or list(output)[-len(prefix) :] == prefix:
                state.logits[last] = -np.inf

    def min_tokens(state: State) -> None:
        if len(output) < params.min_tokens:
            state.logits[list(params.all_stop_token_ids)] = -np.inf

    def bias(state: State) -> None:
        for token, value in (params.logit_bias or {}).items():
            state.logits[token] += value

    def penalties(state: State) -> None:
        for token in {*prompt, *output}:
            logit, count = state.logits[token], list(output).count(token)
            repetition = params.repetition_penalty
            logit = logit / repetition if logit > 0 else logit * repetition
            logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
            state.logits[token] = logit

    def greedy(state: State) -> None:
        state.greedy = int(state.logits.argmax())

    def temperature(state: State) -> None:
        state.logits = state.logits / params.temperature

    def min_p(state: State) -> None:
        if params.min_p:
            probs = softmax(state.logits)
            state.logits[probs < params.min_p * probs.max()] = -np.inf

    def top_k(state: State) -> None:
        if 0 < params.top_k < len(state.logits):
            state.logits[state.logits < np.sort(state.logits)[-params.top_k]] = -np.inf

    def top_p(state: State) -> None:
        if params.top_p < 1:
            probs = softmax(state.logits)
            likelier = np.array([probs[probs > p].sum() for p in probs])
            state.logits[likelier >= params.top_p] = -np.inf

    def pick(state: State) -> None:
        state.probs = softmax(state.logits)

    return {name: stage for name, stage in locals().items() if name in ORDER}
