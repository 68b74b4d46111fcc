"""Times artifacts of pieces on seeded arguments: several interleaved rounds, the median of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from treadle.codegen.bundle import Bundle
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.passes.seeded import draw

if TYPE_CHECKING:
    from treadle.codegen.loader import Artifact

DEFAULT_COUNTS = (1, 16, 256)
ROUNDS = 7
_IDS = 16

Timer = Callable[[Mapping[str, Callable[[], object]]], dict[str, float]]
"""Seconds of each call by name."""


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of each call. Every round runs each once, so that a busy moment hits all alike."""
    for call in calls.values():
        call()  # not timed: first touch of buffers and threads
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def bind(artifact: Artifact, graph: Graph, tokens: int) -> Callable[[], object]:
    """A call of the artifact of `graph` on seeded inputs and weights of that many tokens."""
    generator = torch.Generator().manual_seed(0)
    arguments = []
    for value in graph.inputs:
        assert isinstance(value.type, TensorType), f"%{value.name} is an input of a piece"
        shape, dtype = value.type.at(tokens), value.type.dtype.torch
        if dtype.is_floating_point:
            arguments.append(torch.randn(shape, generator=generator).to(dtype))
        else:
            arguments.append(torch.randint(0, _IDS, shape, generator=generator).to(dtype))
    arguments += [draw(param, generator) for param in graph.params]
    return lambda: artifact(list(arguments))


def usable_counts(most: int, wanted: Sequence[int] = DEFAULT_COUNTS) -> list[int]:
    """The token counts up to `most`; never empty."""
    return [tokens for tokens in wanted if tokens <= most] or [most]


def time_pieces(bundle: Bundle, timer: Timer = interleaved) -> dict[str, dict[int, float]]:
    """Piece -> token count -> seconds, on this machine with the threads torch has now."""
    from treadle.codegen.loader import load_pieces
    from treadle.ir.text import parse_graph

    loaded = load_pieces(bundle)
    graphs = {piece.name: parse_graph(bundle.file(piece.ir).read_text()) for piece in bundle.manifest.pieces}
    times: dict[str, dict[int, float]] = {name: {} for name in loaded}
    for tokens in usable_counts(bundle.manifest.limits.max_num_batched_tokens):
        calls = {name: bind(piece, graphs[name], tokens) for name, piece in loaded.items()}
        for name, seconds in timer(calls).items():
            times[name][tokens] = seconds
    return times
