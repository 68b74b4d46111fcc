"""The server's configuration: where it listens, who may ask, and how much at once. Engine settings are not here."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.config import RUNTIME, SECRET, option
from treadle.ir.errors import ConfigError
from treadle.runtime.chat.reasoning import reasoning_format
from treadle.runtime.chat.tool_formats import tool_format


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one HTTP server. Times are in seconds, sizes in bytes."""

    host: str = option("127.0.0.1", role=RUNTIME, doc="address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, role=RUNTIME, doc="port to listen on; 0 lets the system choose one")
    api_keys: tuple[str, ...] = option((), role=SECRET, doc="keys of which a caller must bring one; none: open")
    served_model_names: tuple[str, ...] = option((), role=RUNTIME, doc="names callers use; default: the bundle's")
    generation_config: str = option(
        "auto", role=RUNTIME, doc="'auto': sampling defaults of the model; 'vllm': neutral ones", choices=("auto", "vllm")
    )
    tool_call_parser: str = option(
        "auto", role=RUNTIME, doc="the form the model writes tool calls in: a name, 'none', or 'auto' for what its chat template shows"
    )
    reasoning_parser: str = option(
        "auto", role=RUNTIME, doc="how the model marks its reasoning: a name, 'none', or 'auto' for what its chat template shows"
    )
    max_body_bytes: int = option(16 << 20, role=RUNTIME, doc="largest request body; a larger one is a 413")
    max_inflight_requests: int = option(1024, role=RUNTIME, doc="requests running and waiting; one more is a 503")
    max_sequences_per_request: int = option(256, role=RUNTIME, doc="most prompts times n of one request")
    max_logprobs: int = option(20, role=RUNTIME, doc="most logprobs for each token")
    max_stored_responses: int = option(1000, role=RUNTIME, doc="answers of /v1/responses kept in memory; 0: none")
    max_stored_response_bytes: int = option(256 << 20, role=RUNTIME, doc="memory for these answers")
    body_timeout: float = option(60.0, role=RUNTIME, doc="time a client has to send its body")
    stall_timeout: float = option(120.0, role=RUNTIME, doc="time a client may leave a stream unread before it is cut")
    drain_timeout: float = option(30.0, role=RUNTIME, doc="time running requests get after SIGTERM")
    dead_grace: float = option(10.0, role=RUNTIME, doc="time /health answers 503 after the engine died, before exit")
    retry_after: int = option(1, role=RUNTIME, doc="Retry-After of a 503")
    metrics_aliases: bool = option(True, role=RUNTIME, doc="also show metrics under vLLM's names")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"ServerConfig.port={self.port} should be from 0 to 65535")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty; leave it out to serve without keys")
        tool_format(self.tool_call_parser, None)
        reasoning_format(self.reasoning_parser, None)
        for name in ("max_body_bytes", "max_inflight_requests", "max_sequences_per_request"):
            if getattr(self, name) < 1:
                raise ConfigError(f"ServerConfig.{name}={getattr(self, name)} should be at least 1")
