"""The op `swiglu_mlp`: a gated feed-forward block as one call, computed in slices of its width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.ir.ops.registry import op


def _shape(x: Tensor, gate_up: Tensor, down: Tensor, *, slices: int = 1) -> Tensor:
    """The result's shape and dtype, for the meta device; refuses what the reference could not multiply."""
    width, hidden = gate_up.shape[0] // 2, gate_up.shape[1]
    if x.shape[-1] != hidden or down.shape[1] != width or width % slices:
        raise TypeError(f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)} in {slices} slices")
    return x.new_empty((*x.shape[:-1], down.shape[0]))


@op("swiglu_mlp(Tensor x, Tensor gate_up, Tensor down, *, int slices=1) -> Tensor", fake=_shape)
def swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor, *, slices: int = 1) -> Tensor:
    """`(silu(x @ gate.T) * (x @ up.T)) @ down.T`: x [..., H], gate_up [2 F, H], down [H, F] -> [..., H].

    gate_up holds the gate's rows, then those of up. The width F is taken in `slices` equal parts whose products are
    added: the intermediate is `slices` times smaller, and a sum is taken in another order.
    """
    gates, ups = gate_up.chunk(2)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    parts = zip(gates.chunk(slices), ups.chunk(slices), down.chunk(slices, dim=1), strict=True)
    for gate, up, back in parts:
        total = total + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), back)
    return total
