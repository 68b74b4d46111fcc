"""The eager references of the dialect against plain formulas: what every kernel is measured by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from treadle.ir.ops.registry import get_op

torch.manual_seed(0)


def ref(name: str, **arguments: Any) -> Any:
    return get_op(name).reference(**arguments)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_softmax_over_visible_keys(window: int | None, softcap: float | None) -> None:
    """Grouped heads, window that counts the query's own token, soft cap, another size for values."""
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 5)
    out = ref("attention", q=q, k=k, v=v, layer=0, scale=0.3, window=window, softcap=softcap)
    for token in range(6):
        first = 0 if window is None else max(0, token - window + 1)
        for head in range(4):
            scores = k[first : token + 1, head // 2] @ q[token, head] * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            expected = scores.softmax(-1) @ v[first : token + 1, head // 2]
            torch.testing.assert_close(out[token, head], expected, atol=1e-5, rtol=1e-5)


def test_attention_sinks_take_weight() -> None:
    q, k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.ones(3, 2, 4)
    plain = ref("attention", q=q, k=k, v=v, layer=0, scale=0.5)
    sunk = ref("attention", q=q, k=k, v=v, layer=0, scale=0.5, sinks=torch.tensor([0.0, -1e9]))
    torch.testing.assert_close(plain, torch.ones_like(plain))
    assert (sunk[:, 0] < 0.99).all()
    torch.testing.assert_close(sunk[:, 1], plain[:, 1])


def test_rope_turns_pairs() -> None:
    """Halves and interleaved pairs; features beyond the rotary size pass through."""
    x = torch.randn(3, 2, 10)
    angle = torch.randn(3, 4)
    halves = torch.cat([angle, angle], -1)
    out = ref("rope", x=x, cos=halves.cos(), sin=halves.sin())
    a, b = x[..., :4], x[..., 4:8]
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    torch.testing.assert_close(out, torch.cat([a * c - b * s, b * c + a * s, x[..., 8:]], -1))
    pairs = angle.repeat_interleave(2, -1)
    turned = ref("rope", x=x[..., :8], cos=pairs.cos(), sin=pairs.sin(), interleaved=True)
    torch.testing.assert_close(turned[..., 0::2], x[..., 0:8:2] * c - x[..., 1:8:2] * s)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("scale_in_f32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(offset: float, scale_in_f32: bool, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(n, dtype=dtype) for n in ((5, 8), (5, 8), (8,)))
    settings = {"eps": 1e-5, "offset": offset, "scale_in_f32": scale_in_f32}
    normed, total = ref("add_rms_norm", x=x, residual=residual, weight=weight, **settings)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, ref("rms_norm", x=total, weight=weight, **settings))
    wide = F.rms_norm(total.float(), (8,), None, 1e-5) * (weight.float() + offset)
    torch.testing.assert_close(normed.float(), wide, atol=1e-6 if dtype == torch.float32 else 0.05, rtol=0.02)
    assert normed.dtype == dtype


def test_experts_sum_the_chosen() -> None:
    x, gate_up, down = torch.randn(5, 6), torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    ids = torch.tensor([[0, 2], [2, 0], [1, 2], [1, 0], [2, 1]])
    weights = torch.rand(5, 2)
    out = ref("experts", x=x, ids=ids, weights=weights, gate_up=gate_up, down=down, act="silu")
    for token in range(5):
        total = torch.zeros(6)
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            total += weight * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(out[token], total, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_moe_is_router_and_experts(scoring: str) -> None:
    """Scores, top two, weights over their sum times a factor, experts, and the shared expert's part."""
    x, router, gate_up, down = torch.randn(5, 6), torch.randn(3, 6), torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    shared, logits = torch.randn(5, 6), x @ router.T
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    weights, ids = scores.topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) * 2.5
    routed = ref("experts", x=x, ids=ids, weights=weights, gate_up=gate_up, down=down, act="silu")
    settings = {"top_k": 2, "act": "silu", "scoring": scoring, "renormalise": True, "scale": 2.5}
    out = ref("moe", x=x, router=router, gate_up=gate_up, down=down, shared=shared, **settings)
    torch.testing.assert_close(out, routed + shared)


def test_moe_chooses_by_bias_within_groups() -> None:
    """The bias decides who is chosen, not the weight; experts of a closed group are never chosen."""
    x, gate_up, down = torch.randn(7, 6), torch.randn(4, 8, 6), torch.randn(4, 6, 4)
    router, bias = torch.zeros(4, 6), torch.tensor([0.0, 9.0, 1.0, 8.0])
    settings = {"top_k": 2, "act": "silu", "scoring": "sigmoid"}
    base = {"x": x, "gate_up": gate_up, "down": down}
    out = ref("moe", router=router, bias=bias, **base, **settings)
    ids, weights = torch.tensor([[1, 3]]).expand(7, 2), torch.full((7, 2), 0.5)
    torch.testing.assert_close(out, ref("experts", ids=ids, weights=weights, act="silu", **base))
    ids = torch.tensor([[0, 1]]).expand(7, 2)
    bias_of_groups = torch.tensor([0.0, 9.5, 1.0, 8.0])
    out = ref("moe", router=router, bias=bias_of_groups, groups=2, top_groups=1, **base, **settings)
    torch.testing.assert_close(out, ref("experts", ids=ids, weights=weights, act="silu", **base))


@pytest.mark.parametrize("across", [False, True])
def test_norm_and_rope_in_one(across: bool) -> None:
    x, angle = torch.randn(5, 3, 8), torch.randn(5, 8)
    cos, sin, weight = angle.cos(), angle.sin(), torch.randn(24 if across else 8)
    normed = ref("rms_norm", x=x.flatten(-2) if across else x, weight=weight, eps=1e-5).reshape(x.shape)
    out = ref("rms_norm_rope", x=x, cos=cos, sin=sin, weight=weight, eps=1e-5, across_heads=across)
    assert torch.equal(out, ref("rope", x=normed, cos=cos, sin=sin))


def test_small_ops() -> None:
    x, rows = torch.randn(5, 6), torch.tensor([4, 0, 0])
    assert torch.equal(ref("select_rows", x=x, rows=rows), x[rows])
    assert [tuple(p.shape) for p in ref("split", x=x, sizes=[1, 2, 3])] == [(5, 1), (5, 2), (5, 3)]
    assert torch.equal(ref("embedding", table=x, ids=rows), x[rows])
    expected = F.gelu(x, approximate="tanh") * (x + 1)
    assert torch.equal(ref("gated_act", gate=x, up=x + 1, act="gelu_tanh"), expected)
    normed, total = ref("add_layer_norm", x=x, residual=x, eps=1e-5)
    assert torch.equal(total, x + x) and torch.equal(normed, F.layer_norm(total, (6,), eps=1e-5))
    assert torch.equal(ref("layer_norm", x=x, eps=1e-5), F.layer_norm(x, (6,), eps=1e-5))
