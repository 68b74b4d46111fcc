"""The dispatcher: a pure function from a batch's shape to a mode, a padded shape and a reason."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.runtime.dispatch import BatchDescriptor, Capabilities, GraphMode, dispatch

PIECEWISE = {(GraphMode.PIECEWISE, BatchDescriptor(num_tokens=size)) for size in (1, 2, 4, 8, 16)}
FULL = {
    (GraphMode.FULL, BatchDescriptor(num_tokens=size, num_reqs=size, uniform=True)) for size in (2, 4, 8)
} | PIECEWISE
FULL_CAPABLE = Capabilities(decode=GraphMode.FULL, mixed=GraphMode.FULL)


@given(tokens=st.integers(1, 40))
def test_pads_to_the_nearest_captured_size(tokens):
    """C10-01, R-10.8: the smallest size that holds the batch; above the largest, eager and unpadded."""
    descriptor = BatchDescriptor(num_tokens=tokens, num_reqs=1)
    mode, padded, reason = dispatch(descriptor, Capabilities(), PIECEWISE)
    if tokens > 16:
        assert (mode, padded) == (GraphMode.NONE, descriptor) and "largest" in reason
    else:
        assert mode is GraphMode.PIECEWISE
        assert padded.num_tokens == min(size for size in (1, 2, 4, 8, 16) if size >= tokens)


def test_full_wins_over_piecewise_wins_over_none():
    """C10-01, R-10.1, R-10.5: piecewise keys ignore request count and uniformity; full ones do not."""
    uniform = BatchDescriptor(num_tokens=3, num_reqs=3, uniform=True)
    mixed = BatchDescriptor(num_tokens=3, num_reqs=2)
    assert dispatch(uniform, FULL_CAPABLE, FULL).mode is GraphMode.FULL
    assert dispatch(uniform, FULL_CAPABLE, FULL).descriptor.num_reqs == 4
    assert dispatch(mixed, FULL_CAPABLE, FULL).mode is GraphMode.PIECEWISE
    assert dispatch(mixed, FULL_CAPABLE, FULL).descriptor.num_reqs is None
    assert dispatch(uniform, Capabilities(), FULL).mode is GraphMode.PIECEWISE
    lowered = dispatch(uniform, Capabilities(decode=GraphMode.NONE, mixed=GraphMode.NONE, reason="-O0"), FULL)
    assert lowered.mode is GraphMode.NONE and "-O0" in lowered.reason


def test_uniform_batches_pad_whole_requests_only():
    """R-10.6: two tokens a request do not fit a graph of one token a request."""
    pairs = BatchDescriptor(num_tokens=4, num_reqs=2, uniform=True)
    assert dispatch(pairs, FULL_CAPABLE, FULL).mode is GraphMode.PIECEWISE


def test_unknown_batch_runs_eager_without_error():
    """C10-01: no key, or adapters that no key knows, mean eager, with a reason."""
    assert dispatch(BatchDescriptor(num_tokens=1), Capabilities(), frozenset()) == (
        GraphMode.NONE, BatchDescriptor(num_tokens=1), "no shape is captured",
    )  # fmt: skip
    adapters = BatchDescriptor(num_tokens=1, has_lora=True, num_active_loras=2)
    assert dispatch(adapters, Capabilities(), PIECEWISE).mode is GraphMode.NONE


def test_descriptor_is_a_frozen_key():
    """C04-20: equal by value, hashable, immutable, and distinct for every number of active adapters."""
    one = BatchDescriptor(num_tokens=4, num_active_loras=1, has_lora=True)
    assert one == dataclasses.replace(one) and hash(one) == hash(dataclasses.replace(one))
    assert one != dataclasses.replace(one, num_active_loras=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.num_tokens = 5  # type: ignore[misc]
