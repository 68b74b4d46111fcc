"""The forward context: set by a manager, nested, restored on errors, and derived where nothing is given."""

from __future__ import annotations

import pytest

from treadle.runtime import forward_context
from treadle.runtime.dispatch import BatchDescriptor
from treadle.runtime.forward_context import ForwardContext, forward_step, using

EMPTY = {"attn_metadata": {}, "slot_mapping": {}, "kv_caches": {}}


def test_nests_and_restores_on_errors():
    """C04-19: the context before comes back, also when the body raises."""
    outer, inner = ForwardContext(**EMPTY), ForwardContext(**EMPTY)
    with using(outer):
        with pytest.raises(KeyError), using(inner):
            assert forward_context.current() is inner
            raise KeyError
        assert forward_context.current() is outer
    assert not forward_context.is_set()


def test_reading_outside_a_step_says_what_to_do():
    """C04-19: the hint names the context manager."""
    with pytest.raises(AssertionError, match=r"with using\(context\)"):
        forward_context.current()


def test_descriptor_and_padding_mask_are_derived():
    """C04-20, C04-21: without a descriptor one of the padded size; True marks padding rows, None when there are none."""
    with forward_step(num_tokens=3, num_padded_tokens=5, **EMPTY) as context:
        assert context.batch_descriptor == BatchDescriptor(num_tokens=5)
        assert context.is_padding is not None and context.is_padding.tolist() == [False] * 3 + [True] * 2
    given = BatchDescriptor(num_tokens=3, num_reqs=1)
    with forward_step(num_tokens=3, batch_descriptor=given, **EMPTY) as context:
        assert context.batch_descriptor is given and context.is_padding is None


def test_moe_layer_names_come_in_program_order():
    """C04-22: names are read from the context, so that no graph holds one."""
    context = ForwardContext(**EMPTY, moe_layers=["a", "b"])
    assert [context.next_moe_layer(), context.next_moe_layer()] == ["a", "b"]
    with pytest.raises(AssertionError, match="more mixture layers"):
        context.next_moe_layer()
