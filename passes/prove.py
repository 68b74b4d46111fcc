"""Proves passes on numbers: each at its turn against the graph it was given, and all of them against the traced graph.

Exact passes must keep every bit through the op references; changing ones keep the table of ir/tolerance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import torch

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Node
from treadle.ir.group import Group, run_ranks
from treadle.ir.interpret import run
from treadle.ir.ops.registry import get_op
from treadle.ir.tolerance import REWRITE, relative_error
from treadle.ir.types import TensorType
from treadle.ir.verify import verify
from treadle.passes.base import Pass
from treadle.passes.seeded import SeededWeights, pick, seeded_inputs

R = TypeVar("R")
Kind = Literal["pass", "all passes", "piece", "program"]
Outputs = dict[int, tuple[torch.Tensor, ...]]
"""Outputs of one graph for each token count."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison. `position` is the pass's place in the pipeline, from 1; `error` is relative to the largest
    output; `bound` 0 means bitwise. `matched` counts the rewrites of a pass.
    """

    kind: Kind
    name: str
    tokens: int
    error: float
    bound: float
    position: int = 0
    matched: int = 0

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def on_ranks(nodes: Iterable[Node], work: Callable[[Group | None], R]) -> list[R]:
    """`work` for each rank that the collectives among `nodes` are over, at the same time; once, without group, if there are none."""
    world = max((node.attrs["world"] for node in nodes if get_op(node.op).collective), default=1)
    return [work(None)] if world == 1 else run_ranks(world, work)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What every form of one model is run on."""

    weights: SeededWeights
    shapes: tuple[int, ...]
    seed: int
    vocabulary: int

    def inputs(self, graph: Any, tokens: int) -> dict[str, Any]:
        """Inputs of a graph or split program by name; logits are asked for of every row."""
        return seeded_inputs(graph.inputs, tokens, self.vocabulary, self.seed)

    def outputs(self, graph: Graph) -> Outputs:
        """Runs the graph op by op at every token count; a graph cut over ranks on all of them, as threads.

        Raises VerifyError if ranks end with different results.
        """

        def of_rank(group: Group | None) -> Outputs:
            params = self.weights.of(graph.params, None if group is None else group.rank)
            return {
                tokens: run(graph, pick(self.inputs(graph, tokens), graph.inputs), params, group) for tokens in self.shapes
            }

        first, *others = on_ranks(graph.nodes, of_rank)
        for rank, found in enumerate(others, 1):
            if any(worst_error(first[tokens], found[tokens]) for tokens in self.shapes):
                raise VerifyError(f"rank {rank} of {len(others) + 1} ends with another result than rank 0")
        return first


def make_trial(traced: Graph, shapes: Sequence[int], seed: int) -> Trial:
    """Seeded weights for a traced graph, and token counts to run it at."""
    logits = traced.outputs[0].type
    assert isinstance(logits, TensorType), "the first output is the logits"
    vocabulary = int(logits.shape[-1])  # type: ignore[arg-type]
    return Trial(
        weights=SeededWeights(traced, seed), shapes=tuple(sorted(set(shapes))), seed=seed, vocabulary=vocabulary
    )


def prove_passes(traced: Graph, steps: Sequence[Pass], trial: Trial) -> tuple[list[Check], Outputs]:
    """Runs `steps` in order on a copy of `traced`, comparing after each that changed something; then all together.

    Also returns the outputs of the traced graph. Raises VerifyError naming the pass that breaks a rule of the IR or
    leaves a graph that does not run.
    """
    graph = traced.copy()
    first = before = trial.outputs(graph)
    checks: list[Check] = []
    changing = False
    for position, step in enumerate(steps, 1):
        matched = step.run(graph).matched
        if not matched:
            continue
        verify(graph, after=step.name)
        after = _outputs_after(step, graph, trial)
        changing = changing or step.tier == "changing"
        bound = _bound(graph) if step.tier == "changing" else 0.0
        checks += [
            Check(
                kind="pass", name=step.name, tokens=tokens, position=position, matched=matched,
                error=worst_error(before[tokens], after[tokens]), bound=bound,
            )
            for tokens in trial.shapes
        ]  # fmt: skip
        before = after
    bound = _bound(graph) if changing else 0.0
    checks += [
        Check(
            kind="all passes", name="all passes", tokens=tokens, bound=bound,
            error=worst_error(first[tokens], before[tokens]),
        )
        for tokens in trial.shapes
    ]  # fmt: skip
    return checks, first


def worst_error(wanted: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> float:
    """The largest relative error over all outputs; infinite if their number differs."""
    if len(wanted) != len(given):
        return float("inf")
    return max(map(relative_error, wanted, given), default=0.0)


def _bound(graph: Graph) -> float:
    kind = graph.outputs[0].type
    assert isinstance(kind, TensorType), "the first output is the logits"
    return REWRITE[str(kind.dtype)]


def _outputs_after(step: Pass, graph: Graph, trial: Trial) -> Outputs:
    try:
        return trial.outputs(graph)
    except (RuntimeError, IndexError, TypeError) as error:
        raise VerifyError(f"after pass {step.name} the graph does not run: {error}") from error
