"""How one operand is quantized: element type, what shares a scale, when the scale is known. No torch.

Text form, in attributes and weight recipes: `quant(i8, per_channel)`, `quant(f8e4m3, per_token, dynamic)`,
`quant(i8, dynamic, per_group=32, scale=bf16)`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from treadle.ir.errors import VerifyError

ELEMENTS = {"i8": 127.0, "f8e4m3": 448.0}
"""Largest magnitude of each element type. int8 leaves -128 out, so that the range is symmetric."""
GRANULARITIES = ("per_tensor", "per_channel", "per_group", "per_token")
SCALES = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class QuantKey:
    """An exact description of one quantized operand. Raises VerifyError for a combination that has no meaning.

    `per_channel` has one scale for each row of a weight [N, K], `per_token` one for each row of an activation,
    `per_group` one for each `group` neighbours along K. `dynamic` scales are computed from the values in each step.
    """

    element: str
    granularity: str
    group: int = 0
    dynamic: bool = False
    symmetric: bool = True
    scale: str = "f32"

    def __post_init__(self) -> None:
        choices = ((self.element, tuple(ELEMENTS)), (self.granularity, GRANULARITIES), (self.scale, SCALES))
        for value, known in choices:
            if value not in known:
                raise VerifyError(f"quant: {value!r} is not known; choose one of: {', '.join(known)}")
        if (self.granularity == "per_group") != (self.group > 0):
            raise VerifyError(f"quant: {self.granularity} with group={self.group}; only per_group has a group, above 0")
        if not self.symmetric and self.element != "i8":
            raise VerifyError(f"quant: {self.element} has no zero point; it is always symmetric")

    @property
    def largest(self) -> float:
        """The largest magnitude that the element type holds."""
        return ELEMENTS[self.element]

    def __str__(self) -> str:
        parts = [self.element, *([] if self.group else [self.granularity])]
        parts += ["dynamic"] if self.dynamic else []
        parts += [] if self.symmetric else ["asymmetric"]
        parts += [f"per_group={self.group}"] if self.group else []
        parts += [] if self.scale == "f32" else [f"scale={self.scale}"]
        return f"quant({', '.join(parts)})"

    __repr__ = __str__


def quant_key_of(call: ast.Call) -> QuantKey:
    """The key from the syntax tree of its text form. Raises VerifyError for anything else."""
    words = [arg.id if isinstance(arg, ast.Name) else ast.unparse(arg) for arg in call.args]
    options = {str(item.arg): ast.unparse(item.value) for item in call.keywords}
    group = options.pop("per_group", "0")
    scale = options.pop("scale", "f32")
    granularity = ["per_group"] if group != "0" else [word for word in words[1:] if word in GRANULARITIES]
    flags = set(words[1:]) - set(granularity)
    if options or len(granularity) != 1 or not group.isdigit() or flags - {"dynamic", "asymmetric"}:
        raise VerifyError(f"{ast.unparse(call)!r} is not a key; write for example quant(i8, per_token, dynamic)")
    return QuantKey(words[0], granularity[0], int(group), "dynamic" in flags, "asymmetric" not in flags, scale)


def parse_quant_key(text: str) -> QuantKey:
    """Reads the text form back. Raises VerifyError."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise VerifyError(f"{text!r} is not a key: {error.msg}") from error
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "quant" and tree.args):
        raise VerifyError(f"{text!r} is not a key; write for example quant(i8, per_token, dynamic)")
    return quant_key_of(tree)
