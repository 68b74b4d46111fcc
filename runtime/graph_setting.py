"""From the graph setting and what the model can do to the modes that steps may run in, with the reason for each step down."""

from __future__ import annotations

from treadle.kernels.attention.interface import CaptureSupport
from treadle.runtime.dispatch import AUTO, GRAPH_SETTINGS, Capabilities, GraphMode


def resolve_capabilities(
    setting: str, support: CaptureSupport, *, obstacle: str = "", decode_query_len: int = 1, any_shape: int = 0
) -> Capabilities:
    """The modes for `setting`, lowered to what `support` (the minimum over the layers) and `obstacle` allow.

    `obstacle` says why the model cannot be captured whole at all, if so. The reason is empty when nothing was lowered.
    """
    decode, mixed = GRAPH_SETTINGS["full" if setting == AUTO else setting]
    full_decode, full_mixed, reason = _allowed(support, obstacle, decode_query_len)
    lower = (decode is GraphMode.FULL and not full_decode) or (mixed is GraphMode.FULL and not full_mixed)
    return Capabilities(
        decode=_capped(decode, full_decode),
        mixed=_capped(mixed, full_mixed),
        decode_query_len=decode_query_len,
        any_shape=any_shape if full_decode else 0,
        reason=reason if lower else "",
    )


def _allowed(support: CaptureSupport, obstacle: str, decode_query_len: int) -> tuple[bool, bool, str]:
    """(FULL for decode, FULL for the rest, what forbids it)."""
    if obstacle:
        return False, False, obstacle
    if support is CaptureSupport.NEVER:
        return False, False, "an attention backend cannot be captured"
    if support is CaptureSupport.ALWAYS:
        return True, True, ""
    if support is CaptureSupport.UNIFORM_BATCH:
        return True, False, "attention can be captured for uniform batches only"
    single = decode_query_len == 1
    return single, False, "attention can be captured for decode steps of one token a request only"


def _capped(mode: GraphMode, full: bool) -> GraphMode:
    return mode if full or mode is not GraphMode.FULL else GraphMode.PIECEWISE
