"""The reference backend: gather the pages, float32 softmax attention in plain PyTorch. Slow, and easy to believe."""

from __future__ import annotations

from typing import ClassVar

import torch

from treadle.kernels.attention.interface import (
    TORCH_DTYPES,
    AttentionQuery,
    Capability,
    CaptureSupport,
    CommonMetadata,
    PersistentMetadata,
    check_forward_support,
    visible_window,
)
from treadle.kernels.native import NativeLibrary


class TorchMetadataBuilder:
    """Hands on the common metadata out of persistent buffers."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int):
        self._buffers = PersistentMetadata(max_num_seqs, max_num_tokens, max_blocks_per_seq)

    def build(self, common: CommonMetadata) -> CommonMetadata:
        """Copies the batch; the result is valid until the next build."""
        check_forward_support(causal=common.causal)
        return self._buffers.fill(common)


class TorchAttentionImpl:
    """Attention of one layer, request by request."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ):
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.sinks = None if sinks is None else sinks.float()

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Scatters k, v [T, K, D] into the cache by slot; slots of -1 are not written."""
        block_size = kv_cache.shape[2]
        rows = torch.nonzero(slot_mapping >= 0).squeeze(1)
        slots = slot_mapping[rows]
        assert bool((slots < kv_cache.shape[0] * block_size).all()), "a slot lies beyond the cache"
        joined = torch.cat((k[rows], v[rows]), dim=-1).to(kv_cache.dtype)
        kv_cache[slots // block_size, :, slots % block_size] = joined

    def forward(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CommonMetadata | None,
        out: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes attention of q [T, H, D] over the pages into out [T, H, D]; zeros when metadata is None."""
        check_forward_support(output_scale=output_scale)
        if metadata is None:
            return out.zero_()
        starts = metadata.query_start_loc.tolist()
        for index, seq_len in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[index], starts[index + 1])
            if rows.start < rows.stop:
                k, v = gather_kv(kv_cache, metadata.block_table[index], seq_len, self.head_size)
                out[rows] = self._attend(q[rows].float(), k.float(), v.float(), metadata.causal).to(out.dtype)
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        """q [t, H, D] and k, v [K, s, D], all float32 -> [t, H, D]; rows that see nothing are zero."""
        group = self.num_heads // self.num_kv_heads
        scores_Hts = q.transpose(0, 1) @ k.repeat_interleave(group, 0).transpose(1, 2) * self.scale
        if self.softcap is not None:
            scores_Hts = self.softcap * torch.tanh(scores_Hts / self.softcap)
        mask_ts = visible_mask(q.shape[0], k.shape[1], self.window, causal)
        scores_Hts = scores_Hts.masked_fill(~mask_ts, -torch.inf)
        if self.sinks is not None:
            sink_column = self.sinks.view(-1, 1, 1).expand(-1, q.shape[0], 1)
            scores_Hts = torch.cat((scores_Hts, sink_column), dim=-1)
        weights_Hts = torch.softmax(scores_Hts, dim=-1)[..., : k.shape[1]].masked_fill(~mask_ts, 0.0)
        return (weights_Hts @ v.repeat_interleave(group, 0)).transpose(0, 1)


def gather_kv(
    kv_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous (k, v) [K, seq_len, D] of one request; slots beyond seq_len are not touched (R-5.19)."""
    block_size = kv_cache.shape[2]
    blocks = block_table[: -(-seq_len // block_size)].long()
    pages = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]
    k, v = pages.split(head_size, dim=-1)
    return k, v


def visible_mask(query_len: int, seq_len: int, window: int | None, causal: bool) -> torch.Tensor:
    """bool [query_len, seq_len]: which keys each of the last `query_len` positions sees."""
    query = torch.arange(seq_len - query_len, seq_len).unsqueeze(1)
    key = torch.arange(seq_len).unsqueeze(0)
    left, right = visible_window(window, causal)
    mask = torch.ones(query_len, seq_len, dtype=torch.bool)
    if left is not None:
        mask &= key >= query - left
    if right is not None:
        mask &= key <= query + right
    return mask


class TorchAttentionBackend:
    """See the module's docstring."""

    name: ClassVar[str] = "torch"
    capture_support: ClassVar[CaptureSupport] = CaptureSupport.NEVER
    block_sizes: ClassVar[str] = "any"
    capability: ClassVar[Capability] = Capability(
        dtypes=tuple(TORCH_DTYPES), block_size_multiple=1, max_head_size=1024, attention_types=("decoder", "encoder_only")
    )

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        return cls.capability.unsupported_reason(query)

    @classmethod
    def make_builder(
        cls, *, max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int, block_size: int, num_threads: int
    ) -> TorchMetadataBuilder:
        return TorchMetadataBuilder(max_num_seqs, max_num_tokens, max_blocks_per_seq)

    @classmethod
    def make_impl(
        cls,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        dtype: str = "f32",
        native: NativeLibrary | None = None,
        sinks: torch.Tensor | None = None,
    ) -> TorchAttentionImpl:
        """`dtype` and `native` are accepted for the sake of one signature; torch computes in float32 anyway."""
        return TorchAttentionImpl(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
