"""A two-layer toy transformer as a stitched program of plain torch callables, and a dense reference of it.

Small enough to run a thousand steps a second, and real where it matters: attention goes through the paged cache.
"""

from __future__ import annotations

import time
from functools import cache

import torch

from treadle.codegen.program import KVLayer, Program, Step
from treadle.runtime.config import EngineConfig
from treadle.runtime.executor.uni import UniExecutor
from treadle.runtime.runner.model import LoadedModel, ModelSpec

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD = 61, 32, 4, 2, 8
WINDOWS = (None, None)
MIXED_WINDOWS = (6, None)
MAX_LEN, MAX_TOKENS = 256, 64


@cache
def toy_weights(vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[0] ** 0.5

    weights = {"embed": random(vocab, HIDDEN) * vocab**0.5, "pos": random(MAX_LEN, HIDDEN) * 4, "head": random(HIDDEN, vocab)}
    for layer in range(2):
        weights[f"qkv{layer}"] = random(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD) * 1.5
        weights[f"out{layer}"] = random(HEADS * HEAD, HIDDEN)
    return weights


def embed(args: list[torch.Tensor]) -> list[torch.Tensor]:
    ids, positions, table, pos = args
    return [table[ids] + pos[positions]]


def project(args: list[torch.Tensor]) -> list[torch.Tensor]:
    x, qkv = args
    parts = (x @ qkv).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=-1)
    return [part.unflatten(-1, (-1, HEAD)) for part in parts]


def mix(args: list[torch.Tensor]) -> list[torch.Tensor]:
    x, attended, out = args
    return [torch.tanh(x + attended.flatten(1) @ out)]


def head(args: list[torch.Tensor]) -> list[torch.Tensor]:
    x, weight = args
    return [x @ weight * 3]


PIECES = {"embed": embed, "project": project, "mix": mix, "head": head}


def toy_program(windows: tuple[int | None, ...] = WINDOWS) -> Program:
    steps = [Step(kind="piece", piece="embed", inputs=["input_ids", "positions"], params=["embed", "pos"], outputs=["x0"])]
    for layer, window in enumerate(windows):
        q, k, v, a = (f"{name}{layer}" for name in "qkva")
        attrs = {
            "layer": layer,
            "scale": HEAD**-0.5,
            "window": window,
            "softcap": None,
            "num_heads": HEADS,
            "num_kv_heads": KV_HEADS,
            "head_size": HEAD,
        }
        steps += [
            Step(kind="piece", piece="project", inputs=[f"x{layer}"], params=[f"qkv{layer}"], outputs=[q, k, v]),
            Step(kind="op", op="attention", inputs=[q, k, v], outputs=[a], attrs=attrs),
            Step(kind="piece", piece="mix", inputs=[f"x{layer}", a], params=[f"out{layer}"], outputs=[f"x{layer + 1}"]),
        ]
    last = f"x{len(windows)}"
    steps += [
        Step(kind="op", op="select_rows", inputs=[last, "logit_rows"], outputs=["picked"]),
        Step(kind="piece", piece="head", inputs=["picked"], params=["head"], outputs=["logits"]),
    ]
    kv_layers = [
        KVLayer(layer=i, num_kv_heads=KV_HEADS, head_size=HEAD, window=window) for i, window in enumerate(windows)
    ]
    inputs = ["input_ids", "positions", "logit_rows"]
    return Program(inputs=inputs, outputs=["logits"], steps=steps, kv_layers=kv_layers)


def toy_model(windows: tuple[int | None, ...] = WINDOWS, vocab: int = VOCAB, **changes) -> LoadedModel:
    spec = ModelSpec(
        name="toy", vocab_size=vocab, max_model_len=MAX_LEN, max_num_batched_tokens=MAX_TOKENS, dtype="f32"
    )
    return LoadedModel(spec, toy_program(windows), PIECES, toy_weights(vocab), **changes)


class ToyExecutor(UniExecutor):
    windows: tuple[int | None, ...] = WINDOWS
    vocab = VOCAB

    def load_model(self, config: EngineConfig) -> LoadedModel:
        return toy_model(self.windows, self.vocab)


class WindowedToyExecutor(ToyExecutor):
    windows = MIXED_WINDOWS


class TextToyExecutor(ToyExecutor):
    """Has the vocabulary of the tiny tokenizer."""

    vocab = 400


class SlowToyExecutor(TextToyExecutor):
    """Takes 5 ms a step, so that a test can act while requests run."""

    def execute_model(self, step) -> None:
        time.sleep(0.005)
        super().execute_model(step)


class FailingExecutor(ToyExecutor):
    """Dies in the step that schedules token 13; stands for a bug in the engine."""

    def execute_model(self, step) -> None:
        if any(13 in new.prompt_token_ids for new in step.new):
            raise RuntimeError("boom")
        super().execute_model(step)


class UnstartableExecutor(ToyExecutor):
    def load_model(self, config: EngineConfig) -> LoadedModel:
        raise FileNotFoundError("no such model")


def toy_config(executor: type[UniExecutor] = ToyExecutor, **changes) -> EngineConfig:
    defaults = {"bundle": "toy", "executor": executor, "block_size": 4, "kv_cache_bytes": 1 << 20, "max_num_seqs": 16}
    return EngineConfig(**{**defaults, "num_threads": 1, "attention_backend": "torch", **changes})


def dense_logits(tokens: list[int], windows: tuple[int | None, ...] = WINDOWS) -> torch.Tensor:
    """[len(tokens), VOCAB] logits of one whole sequence without any cache."""
    w = toy_weights()
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    [x] = embed([ids, positions, w["embed"], w["pos"]])
    distance = positions[:, None] - positions[None, :]
    for layer, window in enumerate(windows):
        q, k, v = project([x, w[f"qkv{layer}"]])
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * HEAD**-0.5
        visible = (distance >= 0) & (distance < (window or MAX_LEN))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        [x] = mix([x, torch.einsum("hts,shd->thd", weights, v), w[f"out{layer}"]])
    return head([x, w["head"]])[0]


def dense_greedy(prompt: list[int], num_tokens: int, windows: tuple[int | None, ...] = WINDOWS) -> list[int]:
    """The greedy continuation by the dense reference."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dense_logits(tokens, windows)[-1].argmax()))
    return tokens[len(prompt) :]
