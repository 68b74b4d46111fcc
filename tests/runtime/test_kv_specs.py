import dataclasses
import subprocess
import sys
from fractions import Fraction

import pytest

from tests.runtime.fake_runner import full_spec, window_spec
from treadle.ir.errors import ConfigError
from treadle.runtime.kv_registry import KV_SPECS, SpecRegistry
from treadle.runtime.kv_specs import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLASpec,
    SlidingWindowSpec,
    SSMSpec,
    group_layers,
    merge_specs,
)
from treadle.runtime.scheduler.group_manager import FullAttentionManager, SlidingWindowManager

GEOMETRY = {"block_size": 16, "num_kv_heads": 3, "head_size": 64}
LATENT = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": "bf16"}


def test_immutable_and_compared_by_value():
    """C01-05: specs cannot drift: no field can be set, equal ones are one key."""
    spec = full_spec()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 8  # type: ignore[misc]
    assert spec == full_spec() and len({spec, full_spec()}) == 1


def test_page_size_is_derived():
    """C01-05: page = heads x states x (K + V) x bytes of an element."""
    spec = FullAttentionSpec(**GEOMETRY, dtype="bf16")
    assert spec.page_size_bytes == 3 * 16 * (64 + 64) * 2
    assert dataclasses.replace(spec, head_size_v=32).page_size_bytes == 3 * 16 * (64 + 32) * 2


def test_merge_keeps_flags_and_refuses_mixtures():
    """C01-05: a merged group has its members' flags; flagged and unflagged layers end in separate groups."""
    plain, flagged = MLASpec(**LATENT), MLASpec(**LATENT, non_causal_multi_token_decode=True)
    assert merge_specs([flagged, flagged]).non_causal_multi_token_decode
    with pytest.raises(ConfigError, match="equal specs"):
        merge_specs([plain, flagged])
    groups = group_layers({0: plain, 1: flagged, 2: plain, 3: flagged})
    assert [(g.layers, g.spec.non_causal_multi_token_decode) for g in groups] == [((0, 2), False), ((1, 3), True)]


@pytest.mark.parametrize(("per_state", "states"), [(1, 16), (4, 4), (Fraction(1, 2), 32), (Fraction(16, 3), 3)])
def test_rational_tokens_per_state(per_state, states):
    """C01-06: exact state counts for several tokens a state and several states a token."""
    spec = FullAttentionSpec(**GEOMETRY, dtype="f32", tokens_per_state=per_state)
    assert spec.num_states_per_block == states
    assert spec.page_size_bytes == 3 * states * 128 * 4


@pytest.mark.parametrize("per_state", [3, Fraction(32, 3), 0.5, 0, -1])
def test_uneven_or_inexact_states_are_rejected(per_state):
    """C01-06: a block of a fractional number of states is refused at start-up, and so are floats."""
    with pytest.raises(ValueError, match=r"states|tokens_per_state"):
        FullAttentionSpec(**GEOMETRY, dtype="f32", tokens_per_state=per_state)


def test_quantised_page():
    """C01-07: an fp8 page is half of an fp16 page of the same geometry."""
    f16 = FullAttentionSpec(**GEOMETRY, dtype="f16")
    fp8 = dataclasses.replace(f16, kv_quant_mode="fp8")
    assert fp8.page_size_bytes * 2 == f16.page_size_bytes and fp8.cache_dtype == "f8e4m3"
    with pytest.raises(ConfigError, match="none, fp8"):
        dataclasses.replace(f16, kv_quant_mode="fp9")
    with pytest.raises(ConfigError, match="f32, bf16"):
        dataclasses.replace(f16, dtype="f64")


def test_hybrid_allocator_off():
    """C01-08: window layers are allocated in full, beside the other layers, in one group."""
    specs = {0: full_spec(), 1: window_spec(8), 2: window_spec(6)}
    (group,) = group_layers(specs, hybrid=False)
    assert group.layers == (0, 1, 2) and isinstance(group.spec, FullAttentionSpec)
    assert window_spec(8).as_full_attention().sliding_window == 8, "still computed with its window"
    assert KV_SPECS.manager_for(type(group.spec)) is FullAttentionManager


def test_window_memory_is_bounded():
    """C01-08: with the hybrid allocator a window layer's memory does not grow with the sequence."""
    spec = window_spec(9)
    assert spec.max_memory_bytes(1000) == 3 * spec.page_size_bytes
    assert spec.max_memory_bytes(5) == 2 * spec.page_size_bytes
    assert full_spec().max_memory_bytes(1000) == 250 * full_spec().page_size_bytes


def test_mla_page():
    """C01-09: one latent vector and no V; the page is padded to the alignment."""
    spec = MLASpec(**LATENT)
    assert spec.page_size_bytes == 16 * 576 * 2
    aligned = MLASpec(**LATENT, alignment=5000)
    assert aligned.page_size_bytes == 20000 and aligned.dense_page_size_bytes == 16 * 576 * 2
    assert KV_SPECS.manager_for(MLASpec) is FullAttentionManager


def test_ssm_state_and_memory_by_mode():
    """C01-10: the state is the sum of its tensors; memory for a request differs by cache mode."""
    spec = SSMSpec(block_size=64, shapes=((4, 8), (16,)), dtypes=("bf16", "f32"), num_draft_tokens=2)
    state = 4 * 8 * 2 + 16 * 4
    assert spec.page_size_bytes == state
    assert spec.max_memory_bytes(1000) == 3 * state
    assert dataclasses.replace(spec, cache_mode="all").max_memory_bytes(1000) == 16 * state
    assert dataclasses.replace(spec, cache_mode="align").max_memory_bytes(100_000) == 4 * state
    with pytest.raises(ConfigError, match="none, all, align"):
        dataclasses.replace(spec, cache_mode="some")


def test_groups_are_of_about_equal_size():
    """C03-24: the common kind is cut to the size of the rare one; every layer is in exactly one group."""
    specs = {i: full_spec() if i % 6 == 5 else window_spec(8) for i in range(12)}
    groups = group_layers(specs)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(12))
    assert {len(group.layers) for group in groups} == {2} and len(groups) == 6
    assert [g.layers for g in group_layers({0: full_spec(), 1: window_spec(8), 2: full_spec()})] == [(0,), (2,), (1,)]
    near = group_layers({i: full_spec() if i % 2 else window_spec(8) for i in range(13)})
    assert [len(group.layers) for group in near] == [7, 6], "almost even kinds are not cut"
    assert group_layers({}) == ()


class Narrow(SlidingWindowSpec):
    pass


class Alien(AttentionSpec):
    pass


ALIEN = Alien(block_size=4, num_kv_heads=1, head_size=4, dtype="f32")


def test_registry_by_class_and_role():
    """C01-13: an unregistered subclass gets its ancestor's manager; managers are found by role too."""
    assert KV_SPECS.manager_for(Narrow) is SlidingWindowManager
    assert KV_SPECS.manager_for_role("sliding_window") is SlidingWindowManager
    with pytest.raises(ConfigError, match="full_attention, sliding_window"):
        KV_SPECS.manager_for_role("mamba")


def test_registry_extends_by_what_differs():
    """C01-13: a new spec class takes a known role, or brings its own manager; duplicates are refused."""
    registry = SpecRegistry()
    registry.register(FullAttentionSpec, "full", FullAttentionManager)
    registry.register(Alien, "full")
    assert registry.manager_for(Alien) is FullAttentionManager
    with pytest.raises(ConfigError, match="already"):
        registry.register(Alien, "full")
    with pytest.raises(ConfigError, match="needs a manager"):
        registry.register(Narrow, "narrow")
    with pytest.raises(ConfigError, match="has a manager already"):
        registry.register(Narrow, "full", SlidingWindowManager)


def test_unknown_spec_is_refused_at_start():
    """C01-14: the error names layer and class."""
    with pytest.raises(ValueError, match=r"layer 3: .*Alien"):
        KV_SPECS.check({0: full_spec(), 3: ALIEN})


def test_unknown_spec_is_refused_under_dash_o():
    """C01-14: the check is no assertion."""
    code = (
        "from tests.runtime.test_kv_specs import ALIEN; from treadle.runtime.kv_registry import KV_SPECS\n"
        "try: KV_SPECS.check({0: ALIEN})\n"
        "except ValueError: print('refused')"
    )
    result = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "refused"


def test_base_is_abstract():
    """C01-05: head count, tokens per state and bytes per state have no default in the base."""
    with pytest.raises(TypeError):
        KVCacheSpec(block_size=4)  # type: ignore[abstract]
    with pytest.raises(ConfigError, match="block_size"):
        full_spec(0)


def test_scheduler_side_imports_no_torch():
    """C01-05: the front end reads specs and requests without loading torch."""
    code = (
        "import sys, treadle.runtime.scheduler.scheduler, treadle.runtime.kv_registry\n"
        "import treadle.runtime.scheduler.group_manager; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
