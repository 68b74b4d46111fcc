"""What is sent and when: requests serialised once, and the moments of an open loop."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from treadle.ir.errors import ConfigError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
ARRIVALS = ("poisson", "constant", "burst")
_WORDS = (
    "the river house garden machine winter letter bridge small bright answer question history music water mountain "
    "teacher window station language kitchen number simple people morning engine paper green city story light"
).split()
"""Common words: nearly every vocabulary has each, with the space before it, as one token."""


@dataclass(frozen=True, kw_only=True)
class ServeLoad:
    """One of `request_rate` (open loop) and `concurrency` (closed loop) is set; lengths in words and tokens."""

    num_prompts: int
    request_rate: float | None = None
    concurrency: int | None = None
    arrival: str = "poisson"
    burst_size: int = 8
    input_len: int = 128
    output_len: int = 128
    spread: float = 0.0
    shared_prefix: int = 0
    endpoint: str = "completions"
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.request_rate is None) == (self.concurrency is None):
            raise ConfigError("give one of --request-rate (open loop) and --concurrency (closed loop)")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"--request-rate {self.request_rate} should be above 0; inf sends all at once")
        if self.arrival not in ARRIVALS:
            raise ConfigError(f"--arrival {self.arrival!r} is not one of: {', '.join(ARRIVALS)}")
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"--endpoint {self.endpoint!r} is not one of: {', '.join(ENDPOINTS)}")


@dataclass(frozen=True)
class Address:
    """Where a server is. `path` is what stands before /v1."""

    host: str
    port: int
    tls: bool = False
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ConfigError for what is no http(s) URL. A trailing /v1 is taken for granted."""
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--base-url {url!r}: {error}") from error
        if scheme not in ("http", "https") or not host:
            raise ConfigError(f"--base-url {url!r} should look like http://127.0.0.1:8000")
        tls = scheme == "https"
        return cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    def url(self, path: str) -> str:
        """The whole URL of a path such as /v1/models."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.path}{path}"


def schedule(load: ServeLoad) -> list[float]:
    """Seconds after the start at which each request of an open loop is due, in order."""
    assert load.request_rate is not None
    rate, draw = load.request_rate, random.Random(load.seed)
    if math.isinf(rate):
        return [0.0] * load.num_prompts
    if load.arrival == "constant":
        return [index / rate for index in range(load.num_prompts)]
    if load.arrival == "burst":
        return [index // load.burst_size * load.burst_size / rate for index in range(load.num_prompts)]
    moments = [0.0]
    while len(moments) < load.num_prompts:
        moments.append(moments[-1] + draw.expovariate(rate))
    return moments


def requests(load: ServeLoad, address: Address, model: str, count: int, api_key: str | None, salt: int = 0) -> list[bytes]:
    """`count` whole HTTP requests as bytes. A different `salt` gives other prompts of the same kind."""
    draw = random.Random(f"{load.seed}/{salt}")
    prefix = random.Random(load.seed).choices(_WORDS, k=load.shared_prefix)
    return [_request(load, address, api_key, _body(load, model, prefix, draw)) for _ in range(count)]


def _body(load: ServeLoad, model: str, prefix: Sequence[str], draw: random.Random) -> bytes:
    text = " ".join([*prefix, *draw.choices(_WORDS, k=_length(load.input_len, load, draw))])
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    body["max_tokens"] = _length(load.output_len, load, draw)
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    return json.dumps(body | dict(load.extra_body)).encode()


def _length(length: int, load: ServeLoad, draw: random.Random) -> int:
    return max(1, draw.randint(int(length * (1 - load.spread)), int(length * (1 + load.spread))))


def _request(load: ServeLoad, address: Address, api_key: str | None, body: bytes) -> bytes:
    head = [
        f"POST {address.path}{ENDPOINTS[load.endpoint]} HTTP/1.1",
        f"Host: {address.host}:{address.port}",
        "Content-Type: application/json",
        *([f"Authorization: Bearer {api_key}"] if api_key else []),
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


LIMITS = ("ttft", "tpot", "e2e")


def parse_limits(given: Sequence[str]) -> dict[str, float]:
    """`ttft:200`, several to a string or in several strings -> name and milliseconds. Raises ConfigError."""
    limits = {}
    for word in " ".join(given).replace(",", " ").split():
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--goodput {word!r} should be NAME:MILLISECONDS, as in ttft:200") from error
        if name not in LIMITS:
            raise ConfigError(f"--goodput {name!r} is not one of: {', '.join(LIMITS)}")
    return limits
