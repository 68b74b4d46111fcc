"""Runs one scheduled step: batch, inputs, dispatch, forward, sampling. All on one device, in this process.

A step has two halves. `execute_model` launches the forward and parks its state; `sample_tokens` consumes it. What
depends on the sampler's choice only (grammar masks) can be prepared between them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch

from treadle.ir.errors import ArtifactError
from treadle.runtime.dispatch import AUTO, Capabilities, GraphKeys, GraphMode, dispatch
from treadle.runtime.forward_context import forward_step
from treadle.runtime.graph_setting import resolve_capabilities
from treadle.runtime.protocol import LogprobRow
from treadle.runtime.runner.attention_layers import AttentionLayers
from treadle.runtime.runner.input_batch import InputBatch
from treadle.runtime.runner.kv_cache import CachePlan, KVCache
from treadle.runtime.runner.launch_plan import LaunchPlan, obstacle
from treadle.runtime.runner.model import LoadedModel, Values
from treadle.runtime.runner.prompt_logprobs import prompt_logprobs_of_step
from treadle.runtime.runner.request_state import RequestState
from treadle.runtime.runner.step_inputs import StepInputs, StepShape, step_shape
from treadle.runtime.runner.update_batch import update_batch
from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.sampling.batch import SamplingBatch
from treadle.runtime.sampling.sampler import Sampler
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.structured.mask import GrammarMask


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Sizes and choices that are fixed for the runner's life."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_threads: int
    seed: int = 0
    logprobs_mode: str = "raw_logprobs"
    graph_setting: str = AUTO
    graph_keys: GraphKeys = frozenset()


@dataclass(slots=True)
class ExecuteState:
    """What a forward leaves for sampling. `logits` is [S, V] of the sampling slots, or None if there are none."""

    shape: StepShape
    program: LoadedModel | LaunchPlan
    values: Values
    logits: torch.Tensor | None


class ModelRunner:
    """Owns the persistent batch, the input buffers and the KV cache of one loaded model."""

    def __init__(self, model: LoadedModel, attention: AttentionLayers, config: RunnerConfig, plan: CachePlan):
        self.model = model
        self.config = config
        self.attention = attention
        self.cache = KVCache(plan)
        self.requests: dict[str, RequestState] = {}
        # One sampling slot more than requests: the batch swaps two slots through it.
        self.sampling = SamplingBatch(config.max_num_seqs + 1, model.spec.vocab_size, seed=config.seed)
        self.batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_sizes=[group.spec.block_size for group in plan.groups],
            listener=self.sampling,
        )
        largest = max((key.num_tokens for _, key in config.graph_keys), default=0)
        self.inputs = StepInputs(
            max_num_tokens=max(config.max_num_batched_tokens, largest),
            max_num_seqs=config.max_num_seqs,
            num_groups=len(plan.groups),
        )
        self.sampler = Sampler(config.logprobs_mode)
        self.graph_modes: Counter[str] = Counter()
        self._parked: ExecuteState | None = None
        attention.make_builders(
            plan.groups,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=self.inputs.input_ids.shape[0],
            max_model_len=config.max_model_len,
            num_threads=config.num_threads,
        )
        model.bind(attention.make_impl)
        self.capabilities, self.launch_plan = self._capture()

    def _capture(self) -> tuple[Capabilities, LaunchPlan | None]:
        """The modes that steps may run in, and the launch plan if FULL is one of them."""
        setting, support = self.config.graph_setting, self.attention.capture_support
        shapes = self.inputs.input_ids.shape[0]
        able = resolve_capabilities(setting, support, obstacle=obstacle(self.model.program, self.model.native), any_shape=shapes)
        if GraphMode.FULL not in (able.decode, able.mixed):
            return able, None
        try:
            plan = LaunchPlan(self.model, lambda layer: self.attention.capture(layer, self.cache.views[layer]))
        except ArtifactError as error:
            return resolve_capabilities(setting, support, obstacle=str(error)), None
        return able, plan

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> None:
        """Applies the step to the batch and runs the forward; the result waits for `sample_tokens`."""
        assert self._parked is None, "the last step's tokens were never sampled"
        update_batch(step, self.requests, self.batch, self.cache.zero_blocks)
        if step.total_num_scheduled_tokens:
            self._parked = self._forward(step_shape(self.batch, step.num_scheduled_tokens))

    def _forward(self, shape: StepShape) -> ExecuteState:
        mode, padded, _ = dispatch(shape.descriptor(), self.capabilities, self.config.graph_keys)
        self.graph_modes[mode.name] += 1
        num_padded = padded.num_tokens
        num_reqs = (padded.num_reqs or shape.num_reqs) if mode is GraphMode.FULL else shape.num_reqs
        self.inputs.fill(self.batch, shape, num_padded)
        metadata, slots = self.attention.build(self.inputs.metadata(self.batch, shape, num_padded, num_reqs))
        with forward_step(
            num_tokens=shape.num_tokens,
            num_padded_tokens=num_padded,
            batch_descriptor=padded,
            graph_mode=mode,
            attn_metadata=metadata,
            slot_mapping=slots,
            kv_caches=self.cache.views,
        ):
            program = self.launch_plan if mode is GraphMode.FULL and self.launch_plan else self.model
            values = program.run_body(self.inputs.input_ids[:num_padded], self.inputs.positions[:num_padded])
            logits = program.logits(values, torch.from_numpy(shape.logit_rows)) if len(shape.logit_rows) else None
        return ExecuteState(shape, program, values, logits)

    @torch.inference_mode()
    def sample_tokens(self, mask: GrammarMask | None = None) -> RunnerOutput:
        """Samples for every request whose known tokens are computed; consumes the parked state.

        `mask` has the allowed tokens of the constrained requests; all others are free.
        """
        state, self._parked = self._parked, None
        if state is None:  # nothing was scheduled
            return RunnerOutput()
        prompt_logprobs = prompt_logprobs_of_step(state, self.batch, self.requests, self.config.logprobs_mode)
        sampled: list[list[int]] = [[] for _ in range(state.shape.num_reqs)]
        logprobs: dict[str, list[LogprobRow]] = {}
        if state.logits is not None:
            slots = state.shape.sampling_slots
            metadata = self.sampling.metadata(slots)
            if mask is not None:
                metadata = replace(metadata, grammar_bitmask=self._bitmask(mask, slots))
            output = self.sampler(state.logits, metadata)
            tokens = output.token_ids.numpy()[:, 0]
            self._record(slots, tokens, sampled)
            if output.logprobs is not None:
                logprobs = self._rows_by_id(slots, output.logprobs)
        return RunnerOutput(list(self.batch.req_ids), sampled, logprobs, prompt_logprobs)

    def _bitmask(self, mask: GrammarMask, slots: np.ndarray) -> torch.Tensor:
        """One row for each slot that samples, int32 [S, words]; all ones where the mask says nothing."""
        rows, first = mask.rows(), mask.first_rows()
        full = np.full((len(slots), mask.num_words), -1, dtype=np.int32)
        for index, slot in enumerate(slots.tolist()):
            if (row := first.get(self.batch.req_ids[slot])) is not None:
                full[index] = rows[row]
        return torch.from_numpy(full)

    def _record(self, slots: np.ndarray, tokens: np.ndarray, sampled: list[list[int]]) -> None:
        """Appends the tokens to the batch, to the requests' outputs and to the step's result."""
        self.batch.append_sampled(slots, tokens)
        req_ids, requests = self.batch.req_ids, self.requests
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            requests[req_ids[slot]].output.append(token)
            sampled[slot].append(token)

    def _rows_by_id(self, slots: np.ndarray, rows: list[LogprobRow | None]) -> dict[str, list[LogprobRow]]:
        req_ids = self.batch.req_ids
        return {req_ids[slot]: [row] for slot, row in zip(slots.tolist(), rows, strict=True) if row is not None}
