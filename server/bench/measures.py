"""From timed requests to TTFT, ITL, TPOT, end-to-end latency, rates and goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.server.bench.http_stream import Timed
from treadle.server.bench.summary import summarise


def latencies(timed: Timed) -> dict[str, float]:
    """Milliseconds of one request from when it was due: ttft and e2e, and tpot if more than one token came."""
    found = {"e2e": (timed.ended - timed.scheduled) * 1e3}
    if timed.arrivals:
        found["ttft"] = (timed.arrivals[0] - timed.scheduled) * 1e3
        if (tokens := num_tokens(timed)) > 1:
            found["tpot"] = (timed.arrivals[-1] - timed.arrivals[0]) * 1e3 / (tokens - 1)
    return found


def num_tokens(timed: Timed) -> int:
    """New tokens by the server's count; chunks with text where it gives none."""
    return timed.completion_tokens if timed.completion_tokens is not None else len(timed.arrivals)


def is_good(timed: Timed, limits: Mapping[str, float]) -> bool:
    """Whether a request ended well and within every limit that it has a value for."""
    found = latencies(timed)
    return timed.error is None and all(found.get(name, 0.0) <= limit for name, limit in limits.items())


def measure_requests(requests: Sequence[Timed], limits: Mapping[str, float]) -> dict[str, Any]:
    """Everything that a report says of a run. Failed requests are counted with their errors and are in no latency."""
    good = [timed for timed in requests if timed.error is None]
    seconds = max(t.ended for t in requests) - min(t.scheduled for t in requests)
    each = [latencies(timed) for timed in good]
    gaps = [later - earlier for t in good for earlier, later in zip(t.arrivals, t.arrivals[1:], strict=False)]
    output, prompt = sum(map(num_tokens, good)), sum(t.prompt_tokens or 0 for t in good)
    found: dict[str, Any] = {
        "requests": len(requests),
        "failed": len(requests) - len(good),
        "errors": dict(Counter(t.error for t in requests if t.error is not None).most_common(5)),
        "seconds": round(seconds, 6),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": round(len(good) / seconds, 4),
        "output_tokens_per_second": round(output / seconds, 4),
        "total_tokens_per_second": round((output + prompt) / seconds, 4),
    }
    for name in ("ttft", "tpot", "e2e"):
        found[f"{name}_ms"] = summarise([one[name] for one in each if name in one])
    found["itl_ms"] = summarise(gaps, 1e3)
    found["send_delay_ms"] = summarise([t.sent - t.scheduled for t in good], 1e3)
    if limits:
        within = sum(is_good(timed, limits) for timed in requests)
        found["goodput"] = {"limits_ms": dict(limits), "requests_per_second": round(within / seconds, 4), "share": within / len(requests)}
    return found
