"""The settings and the table of the dispatcher: every batch up to the limits has a mode and a reason."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.kernels.attention.interface import CaptureSupport
from treadle.runtime.dispatch import AUTO, GRAPH_SETTINGS, BatchDescriptor, Capabilities, GraphMode, dispatch
from treadle.runtime.dispatch_table import dispatch_table
from treadle.runtime.graph_setting import resolve_capabilities

FULL, PIECEWISE, NONE = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE


@pytest.mark.parametrize(
    ("setting", "support", "decode", "mixed", "reason"),
    [
        ("full", CaptureSupport.ALWAYS, FULL, FULL, ""),
        (AUTO, CaptureSupport.ALWAYS, FULL, FULL, ""),
        ("full_and_piecewise", CaptureSupport.ALWAYS, FULL, PIECEWISE, ""),
        ("full_decode_only", CaptureSupport.ALWAYS, FULL, NONE, ""),
        ("piecewise", CaptureSupport.ALWAYS, PIECEWISE, PIECEWISE, ""),
        ("none", CaptureSupport.NEVER, NONE, NONE, ""),
        ("full", CaptureSupport.UNIFORM_BATCH, FULL, PIECEWISE, "uniform batches"),
        ("full_and_piecewise", CaptureSupport.UNIFORM_BATCH, FULL, PIECEWISE, ""),
        ("full", CaptureSupport.UNIFORM_SINGLE_TOKEN_DECODE, FULL, PIECEWISE, "one token a request"),
        ("full_decode_only", CaptureSupport.NEVER, PIECEWISE, NONE, "cannot be captured"),
        (AUTO, CaptureSupport.NEVER, PIECEWISE, PIECEWISE, "cannot be captured"),
    ],
)
def test_a_setting_is_lowered_to_what_attention_supports(setting, support, decode, mixed, reason) -> None:
    """C10-03, R-10.9 to R-10.11: the ladder is fixed, and a reason is given exactly when something was lowered."""
    able = resolve_capabilities(setting, support)
    assert (able.decode, able.mixed) == (decode, mixed)
    assert reason in able.reason and bool(able.reason) == bool(reason)


def test_decode_of_several_tokens_needs_uniform_batches() -> None:
    """R-10.11: a backend for single-token decode captures nothing when each request brings two tokens."""
    able = resolve_capabilities("full", CaptureSupport.UNIFORM_SINGLE_TOKEN_DECODE, decode_query_len=2)
    assert (able.decode, able.mixed) == (PIECEWISE, PIECEWISE)
    able = resolve_capabilities("full", CaptureSupport.UNIFORM_BATCH, decode_query_len=2)
    assert able.highest(BatchDescriptor(num_tokens=6, num_reqs=3, uniform=True)) is FULL
    assert able.highest(BatchDescriptor(num_tokens=3, num_reqs=3, uniform=True)) is PIECEWISE


@given(
    setting=st.sampled_from([AUTO, *GRAPH_SETTINGS]),
    support=st.sampled_from(list(CaptureSupport)),
    any_shape=st.sampled_from([0, 12, 40]),
    piecewise=st.sets(st.integers(1, 40), max_size=4),
    full=st.sets(st.integers(1, 8), max_size=3),
)
def test_every_batch_has_a_mode_a_shape_that_holds_it_and_a_reason(setting, support, any_shape, piecewise, full) -> None:
    """C10-01, C10-02: total, deterministic, never above what the setting and the support allow, never a smaller shape."""
    able = resolve_capabilities(setting, support, any_shape=any_shape)
    keys = {(PIECEWISE, BatchDescriptor(num_tokens=size)) for size in piecewise}
    keys |= {(FULL, BatchDescriptor(num_tokens=size, num_reqs=size, uniform=True)) for size in full}
    for tokens, reqs, uniform in itertools.product(range(1, 45), (1, 3, 8), (False, True)):
        if tokens < reqs or (uniform and tokens % reqs):
            continue
        descriptor = BatchDescriptor(num_tokens=tokens, num_reqs=reqs, uniform=uniform)
        mode, padded, reason = dispatch(descriptor, able, keys)
        assert reason and mode <= able.highest(descriptor)
        assert padded.num_tokens >= tokens and (mode is not NONE or padded == descriptor)
        assert (mode, padded) in keys or padded == descriptor
        assert dispatch(descriptor, able, keys) == (mode, padded, reason)
        decode = uniform and tokens == reqs
        if mode is FULL:
            assert able.decode is FULL if decode else able.mixed is FULL
            assert support is CaptureSupport.ALWAYS or decode


def test_the_table_joins_equal_answers() -> None:
    """Acceptance 2: decode and other steps, in runs; together they cover every count up to the limits once."""
    keys = {(PIECEWISE, BatchDescriptor(num_tokens=size)) for size in (4, 8)}
    able = Capabilities(decode=FULL, mixed=PIECEWISE, any_shape=6)
    rows = dispatch_table(able, keys, max_tokens=10, max_reqs=7)
    shown = [(row.batch, row.start, row.end, row.mode, row.padded_to) for row in rows]
    assert shown == [
        ("decode", 1, 6, "FULL", None),
        ("decode", 7, 7, "PIECEWISE", 8),
        ("other", 1, 4, "PIECEWISE", 4),
        ("other", 5, 8, "PIECEWISE", 8),
        ("other", 9, 10, "NONE", None),
    ]
