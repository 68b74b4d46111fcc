"""Weight plans: a parameter of a graph is a recipe over checkpoint tensors, not a tensor.

Passes edit recipes together with the graph; the loader evaluates them while it streams the checkpoint. The
text form of a recipe is a Python-like call, for example `concat([load("q"), load("k")], dim=0)`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from treadle.ir.errors import ModelError, VerifyError
from treadle.ir.packing import pack
from treadle.ir.quant_key import QuantKey, quant_key_of
from treadle.ir.quantize import fitted_scale_of, quantize_with
from treadle.ir.types import DTYPES, DType

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes. Fields that are recipes (or tuples of them) come first in the text form."""

    def sources(self) -> Iterator[str]:
        """Names of the checkpoint tensors it reads, in order, with repeats."""
        for part in self.parts():
            yield from part.sources()

    def parts(self) -> Iterator[Recipe]:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Recipe):
                yield value
            elif isinstance(value, tuple):
                yield from (part for part in value if isinstance(part, Recipe))

    def evaluate(self, read: Read) -> torch.Tensor:
        """Computes the tensor; `read(name)` gives a checkpoint tensor (CPU, as stored)."""
        raise AssertionError(f"{type(self).__name__} has no evaluate")

    def __str__(self) -> str:
        return f"{_NAMES[type(self)]}({', '.join(_argument_text(self))})"


@dataclass(frozen=True)
class Load(Recipe):
    """A checkpoint tensor by name."""

    name: str

    def sources(self) -> Iterator[str]:
        yield self.name

    def evaluate(self, read: Read) -> torch.Tensor:
        return read(self.name)


@dataclass(frozen=True)
class Literal(Recipe):
    """A small tensor that exists only in the model code (rotary frequencies, scales): values in row order."""

    dtype: DType
    shape: tuple[int, ...]
    values: tuple[float | int, ...]

    def evaluate(self, read: Read) -> torch.Tensor:
        return torch.tensor(self.values, dtype=self.dtype.torch).reshape(self.shape)

    @staticmethod
    def of(tensor: torch.Tensor) -> Literal:
        return Literal(DType.of(tensor.dtype), tuple(tensor.shape), tuple(tensor.flatten().tolist()))


@dataclass(frozen=True)
class Concat(Recipe):
    of: tuple[Recipe, ...]
    dim: int = 0

    def evaluate(self, read: Read) -> torch.Tensor:
        return torch.cat([part.evaluate(read) for part in self.of], dim=self.dim)


@dataclass(frozen=True)
class Stack(Recipe):
    of: tuple[Recipe, ...]
    dim: int = 0

    def evaluate(self, read: Read) -> torch.Tensor:
        return torch.stack([part.evaluate(read) for part in self.of], dim=self.dim)


@dataclass(frozen=True)
class Slice(Recipe):
    """Elements `start` up to `stop` of one dimension."""

    of: Recipe
    dim: int
    start: int
    stop: int

    def evaluate(self, read: Read) -> torch.Tensor:
        return self.of.evaluate(read).narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class Transpose(Recipe):
    of: Recipe
    dim0: int = 0
    dim1: int = 1

    def evaluate(self, read: Read) -> torch.Tensor:
        return self.of.evaluate(read).transpose(self.dim0, self.dim1)


@dataclass(frozen=True)
class Reshape(Recipe):
    of: Recipe
    shape: tuple[int, ...]

    def evaluate(self, read: Read) -> torch.Tensor:
        return self.of.evaluate(read).reshape(self.shape)


@dataclass(frozen=True)
class AddScalar(Recipe):
    """Adds a constant; GGUF stores some norms as weight + 1."""

    of: Recipe
    value: float

    def evaluate(self, read: Read) -> torch.Tensor:
        return self.of.evaluate(read) + self.value


@dataclass(frozen=True)
class UnpermuteRope(Recipe):
    """Undoes the row order that GGUF uses for rotary projections of Llama: interleaved pairs to halves."""

    of: Recipe
    heads: int

    def evaluate(self, read: Read) -> torch.Tensor:
        weight = self.of.evaluate(read)
        half = weight.shape[0] // self.heads // 2
        return weight.reshape(self.heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class Cast(Recipe):
    of: Recipe
    dtype: DType

    def evaluate(self, read: Read) -> torch.Tensor:
        return self.of.evaluate(read).to(self.dtype.torch)


@dataclass(frozen=True)
class Shard(Recipe):
    """One rank's share of dimension `dim`, cut over `world` ranks; no rank is bound in a graph, see `bind_rank`.

    The dimension may be several parts of the given `sizes` that are cut one by one (q, k and v of a joint projection)
    and joined again. `shares[i]` says into how many shares part i is cut: fewer than `world` means that ranks next to each other hold
    the same one (key and value heads that are fewer than ranks). Empty: one part, `world` shares. With `pad` the last
    share is filled up with zeros, so that all are of one size.
    """

    of: Recipe
    dim: int
    world: int
    sizes: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    pad: bool = False
    rank: int | None = None

    def evaluate(self, read: Read) -> torch.Tensor:
        assert self.rank is not None, "bind_rank says whose share it is"
        whole = self.of.evaluate(read)
        sizes = self.sizes or (whole.shape[self.dim],)
        pieces = torch.split(whole, list(sizes), self.dim)
        mine = [self._share(piece, count) for piece, count in zip(pieces, self.counts(), strict=True)]
        return mine[0] if len(mine) == 1 else torch.cat(mine, self.dim)

    def counts(self) -> tuple[int, ...]:
        """Into how many shares each part is cut."""
        return self.shares or (self.world,) * max(len(self.sizes), 1)

    def _share(self, piece: torch.Tensor, count: int) -> torch.Tensor:
        assert self.rank is not None
        total = piece.shape[self.dim]
        size = -(-total // count)
        assert self.pad or size * count == total, f"{total} elements do not make {count} equal shares"
        start = min(self.rank * count // self.world * size, total)
        share = piece.narrow(self.dim, start, min(size, total - start))
        missing = size - share.shape[self.dim]
        if not missing:
            return share
        filler = share.new_zeros([missing if i == self.dim else n for i, n in enumerate(share.shape)])
        return torch.cat([share, filler], self.dim)


@dataclass(frozen=True)
class OnFirstRank(Recipe):
    """The tensor on rank 0, zeros elsewhere: a bias that goes into a sum over ranks once."""

    of: Recipe
    rank: int | None = None

    def evaluate(self, read: Read) -> torch.Tensor:
        assert self.rank is not None, "bind_rank says whose tensor it is"
        value = self.of.evaluate(read)
        return value if self.rank == 0 else torch.zeros_like(value)


@dataclass(frozen=True)
class RankOffset(Recipe):
    """Where this rank's share of `size` rows begins, as an i64 scalar: `rank * size`."""

    size: int
    rank: int | None = None

    def evaluate(self, read: Read) -> torch.Tensor:
        assert self.rank is not None, "bind_rank says whose offset it is"
        return torch.tensor(self.rank * self.size, dtype=torch.int64)


def bind_rank(recipe: Recipe, rank: int) -> Recipe:
    """The recipe as one rank evaluates it: every share in it becomes that rank's."""
    changes: dict[str, Any] = {}
    for item in fields(recipe):
        value = getattr(recipe, item.name)
        if isinstance(value, Recipe):
            changes[item.name] = bind_rank(value, rank)
        elif isinstance(value, tuple) and any(isinstance(part, Recipe) for part in value):
            changes[item.name] = tuple(bind_rank(part, rank) for part in value)
        elif item.name == "rank":
            changes["rank"] = rank
    return replace(recipe, **changes) if changes else recipe


@dataclass(frozen=True)
class Quantize(Recipe):
    """The tensor quantized as `key` says, with the scale that `quantization_scale` of the same gives."""

    of: Recipe
    key: QuantKey

    def evaluate(self, read: Read) -> torch.Tensor:
        value = self.of.evaluate(read)
        return quantize_with(value, fitted_scale_of(value, self.key), self.key)


@dataclass(frozen=True)
class QuantizationScale(Recipe):
    """The scale of the tensor: [N, 1] per channel, [N, K / group] per group, [1, 1] per tensor."""

    of: Recipe
    key: QuantKey

    def evaluate(self, read: Read) -> torch.Tensor:
        return fitted_scale_of(self.of.evaluate(read), self.key)


@dataclass(frozen=True)
class Pack(Recipe):
    """A weight [N, K] rounded to `dtype`, in the panels that CPU kernels read; packing.py has the layout."""

    of: Recipe
    dtype: DType

    def evaluate(self, read: Read) -> torch.Tensor:
        return pack(self.of.evaluate(read).to(self.dtype.torch))


@dataclass(frozen=True)
class Argument(Recipe):
    """A parameter of a piece that several calls share: the weight that the caller passes in this position."""

    position: int

    def evaluate(self, read: Read) -> torch.Tensor:
        raise AssertionError("an argument has no value of its own; the call binds it")


_NAMES: dict[type[Recipe], str] = {
    Load: "load",
    Literal: "literal",
    Concat: "concat",
    Stack: "stack",
    Slice: "slice",
    Transpose: "transpose",
    Reshape: "reshape",
    AddScalar: "add_scalar",
    UnpermuteRope: "unpermute_rope",
    Cast: "cast",
    Shard: "shard",
    OnFirstRank: "on_first_rank",
    RankOffset: "rank_offset",
    Quantize: "quantize",
    QuantizationScale: "quantization_scale",
    Pack: "pack",
    Argument: "argument",
}
_CLASSES = {name: cls for cls, name in _NAMES.items()}


def register_recipe(name: str, cls: type[Recipe]) -> None:
    """Adds a kind of recipe (for a quantization scheme, a packing). Its text form uses `name`."""
    if name in _CLASSES:
        raise ModelError(f"recipe {name!r} is already registered by {_CLASSES[name].__name__}")
    _NAMES[cls], _CLASSES[name] = name, cls


def _argument_text(recipe: Recipe) -> Iterator[str]:
    for item in fields(recipe):
        value = getattr(recipe, item.name)
        if value is item.default and (value is None or value is False or value == ()):
            continue  # what is not said is not printed
        if isinstance(value, Recipe):
            yield str(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Recipe):
            yield f"[{', '.join(map(str, value))}]"
        elif isinstance(value, DType | QuantKey):
            yield f"{item.name}={value}"
        elif isinstance(value, str):
            yield '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        else:
            yield f"{item.name}={list(value) if isinstance(value, tuple) else value!r}"


def parse_recipe(text: str) -> Recipe:
    """Reads the text form back. Raises ModelError that shows the text for anything else."""
    try:
        return recipe_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, VerifyError) as error:
        raise ModelError(f"weight recipe cannot be read: {text!r}: {error}") from error


def recipe_of(tree: ast.expr) -> Any:
    """A recipe, or a literal argument of one, from its syntax tree."""
    match tree:
        case ast.Call(func=ast.Name(id="quant")):
            return quant_key_of(tree)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            if name not in _CLASSES:
                raise ModelError(f"unknown weight recipe {name!r}; known: {', '.join(sorted(_CLASSES))}")
            return _CLASSES[name](*map(recipe_of, args), **{str(k.arg): recipe_of(k.value) for k in keywords})
        case ast.List(elts=items):
            return tuple(map(recipe_of, items))
        case ast.Name(id=name) if name in DTYPES:
            return DTYPES[name]
        case ast.Name(id=("inf" | "nan") as name):
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -recipe_of(operand)
        case ast.Constant(value=value):
            return value
    raise ModelError(f"weight recipe cannot hold {ast.unparse(tree)!r}")
