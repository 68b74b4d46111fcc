"""The order of the passes: from a traced graph to a program over unique pieces. The only place where order is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph
from treadle.passes.base import STAGES, Observe, Pass, PassReport, check_requirements, run_passes
from treadle.passes.library.canonicalise import Canonicalise
from treadle.passes.library.drop_batch_dim import DropBatchDim
from treadle.passes.library.eliminate_common_subexpressions import EliminateCommonSubexpressions
from treadle.passes.library.eliminate_dead_code import EliminateDeadCode
from treadle.passes.library.eliminate_no_ops import EliminateNoOps
from treadle.passes.library.fold_constants import FoldConstants
from treadle.passes.library.fuse_add_layer_norm import FuseAddLayerNorm
from treadle.passes.library.fuse_add_rms_norm import FuseAddRmsNorm
from treadle.passes.library.fuse_all_reduce_rms_norm import FuseAllReduceRmsNorm
from treadle.passes.library.fuse_linears import FuseGateUp, FuseQkv
from treadle.passes.library.fuse_moe import FuseMoe
from treadle.passes.library.fuse_norm_rope import FuseNormRope
from treadle.passes.library.join_slices import JoinSlices
from treadle.passes.library.prepack_weights import PrepackWeights
from treadle.passes.library.raise_addmm import RaiseAddmm
from treadle.passes.library.raise_embedding import RaiseEmbedding
from treadle.passes.library.raise_gated_act import RaiseGatedAct
from treadle.passes.library.raise_layer_norm import RaiseLayerNorm
from treadle.passes.library.raise_linear import RaiseLinear
from treadle.passes.library.raise_rms_norm import RaiseRmsNorm
from treadle.passes.library.raise_rope import RaiseRope
from treadle.passes.library.select_logit_rows import SelectLogitRows
from treadle.passes.library.shard_tensor_parallel import ShardTensorParallel
from treadle.passes.library.sink_permutes import SinkPermutes
from treadle.passes.order import Plan, add_extra
from treadle.passes.registry import parse_passes
from treadle.passes.split import SplitGraph, split, verify_split
from treadle.passes.split_text import print_stage
from treadle.passes.unify import unify


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Level 0 does what running needs and no more; from 1 on everything. `without` names passes to leave out.

    `extra_passes` adds passes, each as `name` or `name{opt=1}`; see registry.py. They run at the end of their stage at
    every level, in the order that they declare.

    `verify` checks the rules of the IR before the first pass and after each one that changed something. More than
    one rank in `tensor_parallel` cuts the model over them, for which patterns are named at every level. `pack` lays
    weights out for the kernels of the target, from level 1 on.
    """

    level: int = 2
    without: tuple[str, ...] = ()
    extra_passes: tuple[str, ...] = ()
    verify: bool = True
    tensor_parallel: int = 1
    pack: bool = False


@dataclass
class CompiledStages:
    """Each stage of a compile, with the pass reports in order. `texts` has the text form of each stage."""

    traced: Graph
    clean: Graph
    raised: Graph
    fused: Graph
    split: SplitGraph
    unified: SplitGraph
    reports: list[PassReport] = field(default_factory=list)

    def stages(self) -> dict[str, Graph | SplitGraph]:
        names = ("traced", "clean", "raised", "fused", "split", "unified")
        return {name: getattr(self, name) for name in names}

    def pipeline(self) -> tuple[str, ...]:
        """The passes that ran, in order, each with the options that are not at their defaults."""
        return tuple(report.spec or report.name for report in self.reports)

    def texts(self) -> dict[str, str]:
        return {name: print_stage(stage) for name, stage in self.stages().items()}


def clean_passes() -> list[Pass]:
    """What every later pass relies on, and every level needs."""
    return [
        Canonicalise(),  # first: the others know one spelling of each meaning only
        DropBatchDim(),  # needs reshape and permute; from here on values are [T, ...]
        Canonicalise(),  # cancels the reshapes that carried the leading 1
        EliminateDeadCode(),  # masks and asserts nobody reads must not become inputs of pieces
    ]


def raise_passes() -> list[Pass]:
    """ATen patterns become named ops."""
    return [
        RaiseEmbedding(),
        RaiseLinear(),
        RaiseAddmm(),  # after raise_linear, which takes the products that need no transposed weight
        RaiseLayerNorm(),
        RaiseRmsNorm(),
        RaiseRope(),
        SinkPermutes(),  # after the norms are named: moves the heads' permute past q and k norms, towards rope's
        Canonicalise(),  # cancels the permutes between norms, rope and attention
        JoinSlices(),  # after rope, whose halves are slices too
        RaiseGatedAct(),
    ]


def fuse_passes() -> list[Pass]:
    """Named ops join."""
    return [
        FoldConstants(),
        EliminateNoOps(),
        EliminateCommonSubexpressions(),  # before fusing: equal inputs must be one value
        FuseMoe(),  # before the norms: the sum over shared experts is not a residual add
        FuseAddRmsNorm(),
        FuseAddLayerNorm(),
        FuseQkv(),  # after rope and norms are named: it follows values through them to attention
        FuseGateUp(),  # after raise_gated_act: the gated activation says which linears belong together
        FuseNormRope(),  # after fuse_qkv, which follows q and k through their norms
        Canonicalise(),
        EliminateDeadCode(),
    ]


def last_passes() -> list[Pass]:
    return [SelectLogitRows()]  # last: it walks back from the logits over whatever the others left


def parallel_passes(world: int) -> list[Pass]:
    """Cuts the model over `world` ranks. After all others: it needs linears joined, and sees where rows are selected."""
    if world == 1:
        return []
    return [ShardTensorParallel(world), FuseAllReduceRmsNorm()]


def target_passes() -> list[Pass]:
    """Fits the program to the target. Last of all: nothing else looks into a packed weight."""
    return [PrepackWeights()]


def known_passes() -> list[str]:
    """Names of all passes of the pipeline, in order of first use."""
    steps = [*clean_passes(), *raise_passes(), *fuse_passes(), *last_passes(), *parallel_passes(2), *target_passes()]
    return list(dict.fromkeys(step.name for step in steps))


def plan_pipeline(options: PipelineOptions) -> Plan:
    """The passes that will run, by stage. Raises ConfigError for an unknown pass, or an order that cannot be had."""
    if unknown := set(options.without) - set(known_passes()):
        raise ConfigError(f"unknown pass {min(unknown)!r} to leave out; known: {', '.join(known_passes())}")
    if needed := {step.name for step in last_passes()} & set(options.without):
        raise ConfigError(f"pass {min(needed)!r} cannot be left out: the runtime asks for logits of chosen rows only")
    optimise = options.level >= 1
    parallel = parallel_passes(options.tensor_parallel)
    steps: Plan = {
        "clean": clean_passes(),
        "raise": raise_passes() if optimise or parallel else [],
        "fuse": fuse_passes() if optimise else [],
        "lower": [*last_passes(), *parallel],
    }
    plan = {stage: [step for step in steps[stage] if step.name not in options.without] for stage in STAGES}
    extra = extra_passes(options)
    add_extra(plan, extra)
    for stage in {step.stage for step in extra}:
        plan[stage].append(EliminateDeadCode())  # what the extra passes left must not become an input of a piece
    if options.pack and optimise:
        plan["lower"] += [step for step in target_passes() if step.name not in options.without]
    check_requirements((step for stage in STAGES for step in plan[stage]), done=())
    return plan


def measured_passes(options: PipelineOptions) -> list[str]:
    """Names of the passes of a pipeline that are there for speed only."""
    plan = plan_pipeline(options)
    return list(dict.fromkeys(step.name for stage in STAGES for step in plan[stage] if step.measured))


def extra_passes(options: PipelineOptions) -> list[Pass]:
    """The passes that were asked for beyond the pipeline, as given."""
    return [step for text in options.extra_passes for step in parse_passes(text)]


def run_pipeline(
    traced: Graph, options: PipelineOptions | None = None, *, observe: Observe | None = None
) -> CompiledStages:
    """Takes a traced graph (which stays as it is) to a program over unique pieces.

    `observe(pass name, graph)` is called after each pass that changed something.

    Raises ConfigError for passes that are unknown or in conflict, VerifyError if a pass breaks the graph.
    """
    options = options or PipelineOptions()
    plan = plan_pipeline(options)
    asked = [step.name for step in extra_passes(options)]
    reports: list[PassReport] = []
    done: list[str] = []

    def stage(graph: Graph, passes: list[Pass]) -> Graph:
        twin = graph.copy()
        reports.extend(run_passes(twin, passes, verify=options.verify, observe=observe, done=done, asked=asked))
        done.extend(name for step in passes for name in step.provides())
        return twin

    clean = stage(traced, plan["clean"])
    raised = stage(clean, plan["raise"])
    fused = stage(raised, [*plan["fuse"], *plan["lower"]])
    pieces = split(fused)
    unified = unify(pieces)
    if options.verify:
        verify_split(unified)
    return CompiledStages(traced, clean, raised, fused, pieces, unified, reports)
