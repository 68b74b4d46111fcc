"""A model runner without a model: it sees only the scheduler's outputs and keeps, for every cache slot, what was written.

Each token's "KV" is the whole prefix that it closes. Before a token is computed, every slot that it attends to is
compared with what it should hold, so a block that is shared, reused or freed wrongly cannot go unseen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from treadle.runtime.kv_specs import FullAttentionSpec, KVCacheGroup, SlidingWindowSpec, group_layers
from treadle.runtime.protocol import CoreOutput, CoreRequest, LogprobRow
from treadle.runtime.request import Request
from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.sampling_params import SamplingParams
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.scheduler.scheduler import Scheduler

VOCAB = 23
EOS = 0


def next_token(tokens: Sequence[int], lora: str | None = None) -> int:
    """The model: a pure function of the prefix."""
    return crc32(repr((lora, list(tokens))).encode()) % VOCAB


def expected_tokens(request: CoreRequest, max_model_len: int) -> list[int]:
    """What a request must give, however it is scheduled."""
    params, output = request.sampling_params, []
    limit = max_model_len - len(request.prompt_token_ids)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    while len(output) < limit:
        output.append(next_token([*request.prompt_token_ids, *output], request.lora_name))
        stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
        if len(output) >= params.min_tokens and output[-1] in stops:
            break
    return output


def full_spec(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=4, dtype="f32")


def window_spec(window: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_size=4, dtype="f32", sliding_window=window)


def make_request(req_id: str, prompt: Sequence[int], max_tokens: int | None = 8, **options) -> Request:
    """Options that CoreRequest does not know go to the sampling parameters."""
    core = {k: options.pop(k) for k in list(options) if k in CoreRequest.__struct_fields__}
    params = SamplingParams(max_tokens=max_tokens, **options)
    params.fill_eos([EOS])
    return Request(
        CoreRequest(
            request_id=req_id, prompt_token_ids=list(prompt), sampling_params=params, **{"arrival_time": 0.0, **core}
        )
    )


def make_scheduler(
    num_blocks: int = 64, specs: Sequence | None = None, promoters: dict | None = None, **options
) -> Scheduler:
    """A scheduler over one layer a spec; the default is one layer of full attention with blocks of 4 tokens."""
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "watermark": 0.0}
    groups = group_layers(dict(enumerate(specs or [full_spec()])))
    return Scheduler(SchedulerConfig(**{**defaults, **options}), groups, num_blocks, promoters)


@dataclass
class RunnerRequest:
    prompt: list[int]
    tokens: list[int]
    tables: list[list[int]]
    num_computed: int
    lora: str | None
    logprobs: bool
    prompt_logprobs: bool

    def content(self, position: int, tokens: Sequence[int]) -> tuple:
        return (self.lora, *tokens[: position + 1])


@dataclass
class FakeRunner:
    """Keeps its own tokens and block tables, and learns of changes through `SchedulerOutput` only."""

    groups: Sequence[KVCacheGroup]
    requests: dict[str, RunnerRequest] = field(default_factory=dict)
    slots: dict[tuple[int, int], tuple] = field(default_factory=dict)  # (block, offset) -> (group, content)

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        self._apply(step)
        todo = {}
        for req_id, count in step.num_scheduled_tokens.items():
            known = self.requests[req_id]
            tokens = known.tokens + step.spec_token_ids.get(req_id, [])
            assert 0 < count <= len(tokens) - known.num_computed, (req_id, count, len(tokens), known.num_computed)
            todo[req_id] = (tokens, range(known.num_computed, known.num_computed + count))
        self._write(todo)
        result = RunnerOutput()
        for req_id, (tokens, positions) in todo.items():
            self._read(req_id, tokens, positions)
            self._sample(req_id, tokens, positions, result)
        return result

    def _apply(self, step: SchedulerOutput) -> None:
        for req_id in step.finished_req_ids:
            self.requests.pop(req_id)
        for req_id in step.preempted_req_ids - step.cached.resumed_req_ids:
            assert req_id not in step.num_scheduled_tokens
        for new in step.new:
            assert new.req_id not in self.requests, f"{new.req_id} is new twice"
            self.requests[new.req_id] = RunnerRequest(
                prompt=list(new.prompt_token_ids),
                tokens=list(new.prompt_token_ids),
                tables=[list(ids) for ids in new.block_ids],
                num_computed=new.num_computed_tokens,
                lora=new.lora_name,
                logprobs=new.sampling_params.logprobs is not None,
                prompt_logprobs=new.sampling_params.prompt_logprobs is not None,
            )
        cached = step.cached
        assert cached.resumed_req_ids == cached.new_token_ids.keys()
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            known = self.requests[req_id]
            known.num_computed = computed
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                known.tokens = known.prompt + cached.new_token_ids[req_id]
                known.tables = [list(ids) for ids in blocks]
            elif blocks is not None:
                for table, ids in zip(known.tables, blocks, strict=True):
                    table.extend(ids)
        assert len(step.new) + len(cached.req_ids) == len(step.num_scheduled_tokens)
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens

    def _slot(self, req_id: str, group: int, position: int) -> tuple[int, int]:
        size = self.groups[group].spec.block_size
        block = self.requests[req_id].tables[group][position // size]
        return block, position % size

    def _write(self, todo: dict[str, tuple[list[int], range]]) -> None:
        for req_id, (tokens, positions) in todo.items():
            for group in range(len(self.groups)):
                for position in positions:
                    slot = self._slot(req_id, group, position)
                    assert slot[0] != 0, "a write to the null block"
                    self.slots[slot] = (group, self.requests[req_id].content(position, tokens))

    def _read(self, req_id: str, tokens: list[int], positions: range) -> None:
        for group, description in enumerate(self.groups):
            window = description.spec.sliding_window if isinstance(description.spec, SlidingWindowSpec) else None
            first = 0 if window is None else max(positions[0] - window + 1, 0)
            for position in range(first, positions[-1] + 1):
                found = self.slots.get(self._slot(req_id, group, position))
                right = (group, self.requests[req_id].content(position, tokens))
                assert found == right, f"{req_id} reads {found} at token {position} of group {group}, not {right}"

    def _sample(self, req_id: str, tokens: list[int], positions: range, result: RunnerOutput) -> None:
        known = self.requests[req_id]
        num_known, end = len(known.tokens), positions[-1] + 1
        sampled: list[int] = []
        if end >= num_known:
            drafts = tokens[num_known:end]
            for draft in [*drafts, None]:
                sampled.append(next_token([*known.tokens, *sampled], known.lora))
                if sampled[-1] != draft:
                    break
        result.req_ids.append(req_id)
        result.sampled_token_ids.append(sampled)
        if known.logprobs and sampled:
            result.logprobs[req_id] = [LogprobRow([t], [-float(num_known + i)], [1]) for i, t in enumerate(sampled)]
        if known.prompt_logprobs and positions[0] < len(known.prompt):
            rows: list[LogprobRow | None] = [None] if positions[0] == 0 else []
            rows += [LogprobRow([known.prompt[p + 1]], [-float(p)], [1]) for p in positions if p + 1 < len(known.prompt)]
            result.prompt_logprobs[req_id] = rows
        known.num_computed = end - max(end - num_known - len(sampled) + 1, 0) if sampled else end
        known.tokens.extend(sampled)


class Loop:
    """Scheduler and runner together; with `depth` 2 one step is in flight while the next is planned."""

    def __init__(self, scheduler: Scheduler, groups: Sequence[KVCacheGroup] | None = None, depth: int = 1):
        self.scheduler = scheduler
        self.runner = FakeRunner(groups or [KVCacheGroup((0,), full_spec())])
        self.depth = depth
        self.pending: deque[tuple[SchedulerOutput, RunnerOutput]] = deque()
        self.outputs: dict[str, list[CoreOutput]] = {}
        self.steps: list[SchedulerOutput] = []

    def step(self) -> SchedulerOutput:
        """Plans and runs one step, and settles the oldest one if `depth` are in flight or nothing could be planned."""
        planned = self.scheduler.schedule()
        self.steps.append(planned)
        result = self.runner.execute(planned)
        if planned.num_scheduled_tokens:
            self.pending.append((planned, result))
        if self.pending and (len(self.pending) >= self.depth or not planned.num_scheduled_tokens):
            self.settle()
        return planned

    def settle(self) -> None:
        for output in self.scheduler.update_from_output(*self.pending.popleft()):
            self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, until: Callable[[], bool] | None = None, max_steps: int = 2000) -> None:
        """Steps until everything is finished and the worker knows it."""
        for _ in range(max_steps):
            if until() if until else not (self.scheduler.has_requests() or self.pending):
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {list(self.scheduler.requests.values())}")

    def tokens(self, req_id: str) -> list[int]:
        return [token for output in self.outputs.get(req_id, []) for token in output.new_token_ids]

    def finish_reason(self, req_id: str) -> str | None:
        return self.outputs[req_id][-1].finish_reason
