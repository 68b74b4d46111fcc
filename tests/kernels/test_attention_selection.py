"""Which backend serves a query, and what a refusal says."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from treadle.ir.errors import ArtifactError, ConfigError
from treadle.kernels.attention import ATTENTION_BACKENDS
from treadle.kernels.attention.interface import AttentionQuery, CaptureSupport
from treadle.kernels.attention.selection import lowest_capture_support, select_backend

QUERY = AttentionQuery(dtype="bf16", head_size=64, num_heads=9, num_kv_heads=3, block_size=16)

UNSUPPORTED = [
    ({"dtype": "i32"}, "activation dtype i32 is not one of f32, bf16, f16"),
    ({"cache_dtype": "fp8"}, "cache dtype fp8 differs from activation dtype bf16"),
    ({"device": "cuda"}, "runs on cpu, not on cuda"),
    ({"head_size": 4096}, "head size 4096 is not in"),
    ({"num_heads": 8}, "8 query heads are not a multiple of 3 key/value heads"),
    ({"window": 0}, "window 0 shows no token"),
    ({"softcap": -1.0}, "soft cap -1.0 is not positive"),
    ({"attention_type": "encoder_decoder"}, "attention type encoder_decoder is not implemented"),
    ({"mla": True}, "multi-head latent attention"),
    ({"alibi": True}, "ALiBi"),
    ({"cascade": True}, "cascade"),
    ({"decode_context_parallel": 2}, "decode context parallelism"),
    ({"multimodal_prefix": True}, "multimodal-prefix"),
    ({"per_sequence_causal": True}, "causal flag for each sequence"),
]


@pytest.mark.parametrize(("change", "reason"), UNSUPPORTED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("backend", ATTENTION_BACKENDS.names())
def test_each_refusal_has_a_reason(backend: str, change: dict[str, Any], reason: str) -> None:
    """C05-02: the whole combination is checked, and the sentence names the value."""
    found = ATTENTION_BACKENDS.get(backend).unsupported_reason(replace(QUERY, **change))
    assert found is not None and reason in found
    assert ATTENTION_BACKENDS.get(backend).unsupported_reason(QUERY) is None


def test_first_that_fits_wins() -> None:
    """C05-02: in the order of the table, with nothing passed over."""
    selection = select_backend(QUERY)
    assert (selection.backend.name, selection.passed_over) == ("cpu", {})
    assert select_backend(QUERY, candidates=("torch", "cpu")).backend.name == "torch"


def test_passing_over_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """C05-02, C05-03: block size 8 is not the C++ kernel's; the next candidate is taken, and the log says why."""
    with caplog.at_level(logging.WARNING):
        selection = select_backend(replace(QUERY, block_size=8))
    assert selection.backend.name == "torch"
    assert "block size 8 is not a multiple of 16" in selection.passed_over["cpu"]
    assert "block size 8 is not a multiple of 16" in caplog.text


def test_none_fits_lists_every_reason() -> None:
    """C05-02: one error with all candidates."""
    with pytest.raises(ConfigError) as error:
        select_backend(replace(QUERY, mla=True))
    for name in ATTENTION_BACKENDS.names():
        assert f"  {name}: multi-head latent attention is not implemented" in str(error.value)


def test_forced_backend_is_never_replaced() -> None:
    """C05-02: unsuitable -> its reason; unknown -> the names there are."""
    assert select_backend(QUERY, "torch").backend.name == "torch"
    with pytest.raises(ConfigError, match="'cpu' cannot serve this model: block size 8"):
        select_backend(replace(QUERY, block_size=8), "cpu")
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'; choose one of: cpu, torch"):
        select_backend(QUERY, "flash")


def test_native_backend_needs_its_library() -> None:
    """C05-02: no silent fallback to another backend."""
    with pytest.raises(ArtifactError, match="needs the native library 'cpu_attention'"):
        ATTENTION_BACKENDS.get("cpu").make_impl(num_heads=1, num_kv_heads=1, head_size=8, scale=1.0)


def test_capture_support_is_the_minimum() -> None:
    """C05-02: levels compare, and a model is as capturable as its least backend."""
    levels = CaptureSupport
    assert levels.ALWAYS > levels.UNIFORM_BATCH > levels.UNIFORM_SINGLE_TOKEN_DECODE > levels.NEVER
    backends = [ATTENTION_BACKENDS.get(name) for name in ("cpu", "torch")]
    assert lowest_capture_support(backends) is CaptureSupport.NEVER
    assert lowest_capture_support([]) is CaptureSupport.ALWAYS
