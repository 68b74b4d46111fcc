"""Types of IR values: tensors whose dimensions are integers or affine expressions over T, and opaque state.

T, the number of tokens in a step, is the only symbol. Dtypes are short strings: f32, bf16, i64, ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch

from treadle.ir.dtypes import DTYPES, DType

T = sympy.Symbol("T", integer=True, positive=True)

Dim = int | sympy.Expr


@dataclass(frozen=True)
class TensorType:
    """A tensor: `f32[T,576]`."""

    dtype: DType
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(str(dim) for dim in self.shape)}]"

    def at(self, tokens: int) -> tuple[int, ...]:
        """The shape with T replaced by a number."""
        return tuple(evaluate(dim, tokens) for dim in self.shape)

    @property
    def symbolic(self) -> bool:
        return any(not isinstance(dim, int) for dim in self.shape)


@dataclass(frozen=True)
class StateType:
    """State that a graph receives from outside: `kv<3,64>` (heads, head size) or `batch`."""

    kind: str
    params: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.kind + (f"<{','.join(map(str, self.params))}>" if self.params else "")


Type = TensorType | StateType


def tensor(dtype: str, shape: Iterable[Dim]) -> TensorType:
    """Builds a tensor type; dimensions that are sympy integers become ints."""
    return TensorType(DTYPES[str(dtype)], tuple(simplify(dim) for dim in shape))


def simplify(dim: Dim) -> Dim:
    return int(dim) if isinstance(dim, int | sympy.Integer) else dim


def evaluate(dim: object, tokens: int | torch.SymInt) -> int:
    """The value of a dimension for a token count; works with a SymInt while a graph is being traced."""
    if not isinstance(dim, sympy.Expr):
        return dim  # type: ignore[return-value]
    if isinstance(tokens, int):
        return int(dim.subs(T, tokens))  # type: ignore[arg-type]
    return sympy.lambdify(T, dim, modules=[{"floor": lambda x: x.__floor__()}, "math"])(tokens)


def affine(points: dict[int, int]) -> Dim:
    """The affine dimension through measured `{tokens: size}` points. Raises ValueError if there is none."""
    (t0, d0), (t1, d1), *rest = points.items()
    slope = sympy.Rational(d1 - d0, t1 - t0)
    dim = simplify(sympy.expand(slope * (T - t0) + d0))  # type: ignore[operator]
    if any(evaluate(dim, t) != d for t, d in rest):
        raise ValueError(f"a dimension is not affine in T: {points}")
    return dim
