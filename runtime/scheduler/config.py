"""What the scheduler may be told. All fields are runtime only: none changes generated code."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.config import RUNTIME, option
from treadle.ir.errors import ConfigError
from treadle.runtime.kv_specs import choose

POLICIES = ("fcfs", "priority")
PREFIX_HASHES = ("sha256", "xxhash")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Budgets, limits and policies; construction raises ConfigError for values that contradict each other."""

    max_num_seqs: int = option(role=RUNTIME, doc="Slots of the model runner.")
    max_num_batched_tokens: int = option(role=RUNTIME, doc="Most tokens the runner computes in one step.")
    max_model_len: int = option(role=RUNTIME, doc="Longest sequence, prompt and output together.")
    max_num_active_seqs: int | None = option(None, role=RUNTIME, doc="Most requests running at once; default max_num_seqs.")
    policy: str = option("fcfs", role=RUNTIME, doc="Who goes first.", choices=POLICIES)
    enable_chunked_prefill: bool = option(True, role=RUNTIME, doc="A prompt may be spread over several steps.")
    long_prefill_token_threshold: int = option(0, role=RUNTIME, doc="Most tokens a step for one request; 0 is off.")
    adaptive_prefill_threshold: bool = option(False, role=RUNTIME, doc="Raise the threshold to the fair share.")
    full_sequence_must_fit: bool = option(True, role=RUNTIME, doc="Admit only if all known tokens would fit.")
    watermark: float = option(0.01, role=RUNTIME, doc="Fraction of blocks that an admission leaves free.")
    reserve_prefill_blocks: bool = option(False, role=RUNTIME, doc="Admissions leave what running prefills still need.")
    enable_prefix_caching: bool = option(True, role=RUNTIME, doc="Share the KV of equal prefixes.")
    prefix_hash: str = option("sha256", role=RUNTIME, doc="Hash of the prefix cache.", choices=PREFIX_HASHES)
    num_lookahead_tokens: int = option(0, role=RUNTIME, doc="Slots kept for draft tokens, for each request.")
    num_draft_slots: int = option(0, role=RUNTIME, doc="Tokens the runner adds to each scheduled request.")
    async_scheduling: bool = option(False, role=RUNTIME, doc="Schedule a step before the last one has come back.")
    decode_interval: int = option(1, role=RUNTIME, doc="Asynchronous: steps between two decodes of one request.")
    defer_block_frees: bool = option(False, role=RUNTIME, doc="Free blocks only after the last step that used them.")
    zero_new_blocks: bool = option(False, role=RUNTIME, doc="List newly taken blocks in the step, to be zeroed.")

    def __post_init__(self) -> None:
        choose("scheduling policy", self.policy, POLICIES)
        choose("prefix hash", self.prefix_hash, PREFIX_HASHES)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "decode_interval"):
            self._check_at_least(name, 1)
        for name in ("long_prefill_token_threshold", "num_lookahead_tokens", "num_draft_slots"):
            self._check_at_least(name, 0)
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is a fraction of the blocks, from 0 to below 1, not {self.watermark}")
        if not 1 <= self.max_active <= self.max_num_seqs:
            raise ConfigError(f"max_num_active_seqs must lie in 1..max_num_seqs={self.max_num_seqs}, not {self.max_active}")
        if self.max_num_scheduled_tokens < 1:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} leaves no room beside {self.num_draft_slots} draft "
                f"slots for each of max_num_seqs={self.max_num_seqs}; raise the former or lower one of the others"
            )
        if not self.enable_chunked_prefill:
            self._check_whole_prefills()

    def _check_at_least(self, name: str, low: int) -> None:
        if getattr(self, name) < low:
            raise ConfigError(f"{name} must be at least {low}, not {getattr(self, name)}")

    def _check_whole_prefills(self) -> None:
        if self.max_num_scheduled_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a step must hold the longest sequence: max_num_batched_tokens="
                f"{self.max_num_batched_tokens} is too small for max_model_len={self.max_model_len}; change one of "
                f"them or set enable_chunked_prefill"
            )
        if self.long_prefill_token_threshold or self.adaptive_prefill_threshold:
            raise ConfigError("a long-prefill threshold cuts prompts into chunks; set enable_chunked_prefill or drop it")

    @property
    def max_active(self) -> int:
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    @property
    def max_num_scheduled_tokens(self) -> int:
        """Tokens the scheduler may hand out in one step: what the runner computes less the draft room."""
        return self.max_num_batched_tokens - self.num_draft_slots * self.max_num_seqs
