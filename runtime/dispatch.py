"""Chooses how a step runs: the best mode that has a key for the batch, its padded shape, and why. Imports no torch.

A pure function: nothing else decides on modes or padding, and whoever runs the step trusts the answer.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple


class GraphMode(IntEnum):
    """How much of a step runs without Python between the parts; a higher one is preferred."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


GRAPH_SETTINGS: dict[str, tuple[GraphMode, GraphMode]] = {
    "none": (GraphMode.NONE, GraphMode.NONE),
    "piecewise": (GraphMode.PIECEWISE, GraphMode.PIECEWISE),
    "full": (GraphMode.FULL, GraphMode.FULL),
    "full_decode_only": (GraphMode.FULL, GraphMode.NONE),
    "full_and_piecewise": (GraphMode.FULL, GraphMode.PIECEWISE),
}
"""Setting -> (mode of decode steps, mode of all others)."""

AUTO = "auto"
"""The most that the model can do."""


@dataclass(frozen=True, kw_only=True)
class BatchDescriptor:
    """The shape of a step. `num_reqs` is None where it does not matter; `uniform`: all requests have equally many tokens."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0

    def relaxed(self) -> BatchDescriptor:
        """What piecewise graphs depend on: tokens and adapters only (attention runs outside of them)."""
        return replace(self, num_reqs=None, uniform=False)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The best mode for a decode step and for any other, and what lowered it, if anything did.

    A decode step is uniform with `decode_query_len` tokens a request. `any_shape` is the most tokens of a step that FULL
    runs unpadded, whatever its shape: launch plans are not bound to one.
    """

    decode: GraphMode = GraphMode.PIECEWISE
    mixed: GraphMode = GraphMode.PIECEWISE
    decode_query_len: int = 1
    any_shape: int = 0
    reason: str = ""

    def highest(self, descriptor: BatchDescriptor) -> GraphMode:
        """The best mode that this batch may run in."""
        decode = descriptor.uniform and descriptor.num_tokens == (descriptor.num_reqs or 0) * self.decode_query_len
        return self.decode if decode else self.mixed


GraphKeys = Set[tuple[GraphMode, BatchDescriptor]]
"""The shapes that are ready to run, each under its mode."""


class Dispatch(NamedTuple):
    """The answer. In mode NONE `descriptor` is the batch as it is, unpadded."""

    mode: GraphMode
    descriptor: BatchDescriptor
    reason: str


def dispatch(descriptor: BatchDescriptor, capabilities: Capabilities, keys: GraphKeys) -> Dispatch:
    """Returns the best mode with a key that holds the batch, padded up to the smallest such key. Never fails."""
    highest = capabilities.highest(descriptor)
    lowered = f"{highest.name} is the most here: {capabilities.reason}" if capabilities.reason else ""
    for mode in sorted(GraphMode, reverse=True):
        if mode is GraphMode.NONE or mode > highest:
            continue
        wanted = descriptor if mode is GraphMode.FULL else descriptor.relaxed()
        fitting = [key for at, key in keys if at is mode and _holds(key, wanted)]
        if fitting:
            chosen = min(fitting, key=lambda key: (key.num_tokens, key.num_reqs or 0))
            return Dispatch(mode, chosen, lowered or f"smallest {mode.name} shape that holds the batch")
        if mode is GraphMode.FULL and descriptor.num_tokens <= capabilities.any_shape:
            return Dispatch(mode, descriptor, f"a launch plan runs every shape of up to {capabilities.any_shape} tokens")
    return Dispatch(GraphMode.NONE, descriptor, _why_none(descriptor, keys, lowered))


def _holds(key: BatchDescriptor, wanted: BatchDescriptor) -> bool:
    """Whether `key` can run `wanted` with padding. Uniform batches pad whole requests, so tokens a request agree."""
    if (key.has_lora, key.num_active_loras) != (wanted.has_lora, wanted.num_active_loras):
        return False
    if key.uniform != wanted.uniform or (key.num_reqs is None) != (wanted.num_reqs is None):
        return False
    if key.num_tokens < wanted.num_tokens or (key.num_reqs or 0) < (wanted.num_reqs or 0):
        return False
    return not key.uniform or _tokens_a_request(key) == _tokens_a_request(wanted)


def _tokens_a_request(descriptor: BatchDescriptor) -> int:
    return descriptor.num_tokens // (descriptor.num_reqs or 1)


def _why_none(descriptor: BatchDescriptor, keys: GraphKeys, lowered: str) -> str:
    if not keys:
        return lowered or "no shape is captured"
    largest = max(key.num_tokens for _, key in keys)
    if descriptor.num_tokens > largest:
        return f"more tokens than the largest captured shape, {largest}"
    return lowered or "no captured shape matches the batch"
