"""Result types of a call, found by running its fake (or its reference) on meta tensors at three token counts.

Every dimension is affine in T, so three sizes determine and check it; nothing symbolic is needed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Node, Operand
from treadle.ir.interpret import concrete
from treadle.ir.ops.registry import Op, get_op
from treadle.ir.types import DType, StateType, TensorType, Type, affine, tensor

PROBES = (13, 29, 53)  # token counts that no other dimension of a model is likely to have


def infer(op: str, operands: dict[str, Operand], attrs: dict[str, Any]) -> tuple[Type, ...]:
    """The types of the results. Raises VerifyError with torch's message if the call is not valid."""
    types = tuple((name, _types(operand)) for name, operand in operands.items())
    return _infer(op, types, tuple((name, _freeze(attr)) for name, attr in attrs.items()))


def infer_node(node: Node) -> tuple[Type, ...]:
    return infer(node.op, node.operands, node.attrs)


def _types(operand: Operand) -> Type | tuple[Type, ...]:
    return tuple(value.type for value in operand) if isinstance(operand, tuple) else operand.type


def _freeze(attr: Any) -> Any:
    return tuple(map(_freeze, attr)) if isinstance(attr, list | tuple) else (type(attr), attr)


def _thaw(attr: Any) -> Any:
    if attr and isinstance(attr, tuple) and isinstance(attr[0], type):
        return attr[1]
    return [_thaw(item) for item in attr]


@lru_cache(maxsize=65536)
def _infer(name: str, types: tuple[tuple[str, Any], ...], attrs: tuple[tuple[str, Any], ...]) -> tuple[Type, ...]:
    op = get_op(name)
    runs = [_probe(op, types, attrs, tokens) for tokens in PROBES]
    if len({len(results) for results in runs}) != 1:
        raise VerifyError(f"{name}: the number of results depends on T")
    return tuple(_type_of(name, results) for results in zip(*runs, strict=True))


def _probe(op: Op, types: tuple[tuple[str, Any], ...], attrs: tuple[tuple[str, Any], ...], tokens: int) -> list[Any]:
    arguments: dict[str, Any] = {}
    for name, kind in types:
        arguments[name] = [_meta(k, tokens) for k in kind] if isinstance(kind, tuple) else _meta(kind, tokens)
    for name, attr in attrs:
        arguments[name] = concrete(_thaw(attr), tokens)
    try:
        with torch.device("meta"):
            out = (op.fake or op.reference)(**arguments)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shown = ", ".join(f"{n}: {', '.join(map(str, k)) if isinstance(k, tuple) else k}" for n, k in types)
        raise VerifyError(f"{op.name}({shown}) is not valid: {str(error).splitlines()[0]}") from error
    return list(out) if isinstance(out, tuple | list) else [out]


def _meta(kind: Type, tokens: int) -> torch.Tensor | None:
    if isinstance(kind, StateType):
        return None
    return torch.empty(kind.at(tokens), dtype=kind.dtype.torch, device="meta")


def _type_of(name: str, results: tuple[torch.Tensor, ...]) -> TensorType:
    first = results[0]
    try:
        shape = [
            affine({tokens: result.shape[axis] for tokens, result in zip(PROBES, results, strict=True)})
            for axis in range(first.dim())
        ]
    except ValueError as error:
        raise VerifyError(f"{name}: {error}") from error
    return tensor(DType.of(first.dtype), shape)
