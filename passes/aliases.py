"""Which results are views of operands, which may be written over one, and sizes in bytes that are affine in T."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Node, Value
from treadle.ir.ops.registry import get_op
from treadle.ir.types import TensorType

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
VIEWS = frozenset(
    {"split", "aten.reshape.default", "aten.permute.default", "aten.slice.Tensor", "aten.expand.default"}
)
_POINTWISE = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default silu.default gelu.default relu.default tanh.default "
    "sigmoid.default rsqrt.default cos.default sin.default exp.default pow.Tensor_Scalar"
)
IN_PLACE = {f"aten.{name}": ("self",) for name in _POINTWISE.split()}


@dataclass(frozen=True, order=False)
class Affine:
    """`slope * T + constant` bytes."""

    slope: int
    constant: int

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.slope + other.slope, self.constant + other.constant)

    def at(self, tokens: int) -> int:
        return self.slope * tokens + self.constant

    def fits_below(self, other: Affine, reach: tuple[int, int]) -> bool:
        """At most `other` for every T of the closed range: a line below another at both ends is so in between."""
        return all(self.at(tokens) <= other.at(tokens) for tokens in reach)

    @staticmethod
    def above(many: Iterable[Affine]) -> Affine:
        """One that is not below any of `many` for any positive T."""
        known = [*many, Affine(0, 0)]
        return Affine(max(one.slope for one in known), max(one.constant for one in known))

    def __str__(self) -> str:
        if not self.slope:
            return str(self.constant)
        return f"{self.slope}*T" + (f" + {self.constant}" if self.constant else "")


def storage_bytes(value: Value) -> Affine:
    """Bytes that hold `value`, each coefficient rounded up to whole cache lines. State takes none."""
    if not isinstance(value.type, TensorType):
        return Affine(0, 0)
    low, middle, high = (_bytes(value.type, tokens) for tokens in (64, 128, 192))
    if high - middle != middle - low:
        raise VerifyError(
            f"%{value.name}: the size of {value.type} is not affine in T, so no storage can be planned"
        )
    slope = (middle - low) // 64
    constant = low - 64 * slope
    return Affine(_round_up(slope), _round_up(max(constant, 0)))


def _bytes(kind: TensorType, tokens: int) -> int:
    count = kind.dtype.torch.itemsize
    for size in kind.at(tokens):
        count *= size
    return count


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def view_base(node: Node) -> Value | None:
    """The operand whose bytes all results of a view op are, None for an op that computes."""
    return next(node.inputs()) if node.op in VIEWS else None


def is_contiguous_view(node: Node) -> bool:
    """Whether the results stand in row order if the operand does: regrouped, or cut along the first dimension."""
    if node.op == "aten.reshape.default":
        return True
    return node.op in ("split", "aten.slice.Tensor") and _first_dim(node) and node.attrs.get("step", 1) == 1


def must_copy(node: Node | None, compact: bool) -> bool:
    """A reshape of values that do not stand in row order has to move them."""
    return node is not None and node.op == "aten.reshape.default" and not compact


def _first_dim(node: Node) -> bool:
    kind = next(node.inputs()).type
    assert isinstance(kind, TensorType)
    return node.attrs.get("dim", get_op(node.op).defaults.get("dim")) % len(kind.shape) == 0


def writable_over(node: Node, position: int) -> Value | None:
    """The operand whose bytes result number `position` may take, as the op declares it."""
    names = IN_PLACE.get(node.op) or get_op(node.op).inplace
    operand = node.operands.get(names[position]) if position < len(names) else None
    return operand if isinstance(operand, Value) else None
