"""What the endpoints of one server share: the engine, the configuration, the gate and the metrics."""

from __future__ import annotations

import hashlib
import hmac
from contextlib import suppress
from typing import Any

from treadle.ir.errors import EngineDeadError
from treadle.runtime.chat.reasoning import reasoning_format
from treadle.runtime.chat.tool_formats import AUTO, ToolFormat, tool_format
from treadle.runtime.protocol import SchedulerStats
from treadle.runtime.renderer import Renderer
from treadle.server.admission import Admission
from treadle.server.config import ServerConfig
from treadle.server.errors import ApiError
from treadle.server.metrics import ServerMetrics
from treadle.server.response_store import ResponseStore


class ServerState:
    """One per application. `engine` follows the contract of `runtime.engine.async_engine.AsyncEngine`."""

    def __init__(self, engine: Any, config: ServerConfig):
        self.engine = engine
        self.config = config
        self.model_names = config.served_model_names or (engine.info.name,)
        self.admission = Admission(config.max_inflight_requests, config.retry_after)
        self.metrics = ServerMetrics(self.model_names[0], aliases=config.metrics_aliases)
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_response_bytes)
        self.running: set[str] = set()
        source = engine.renderer.template_source
        self.tool_format = tool_format(config.tool_call_parser, source) or _described_format(config, engine.renderer)
        self.reasoning_format = reasoning_format(config.reasoning_parser, source)
        self._key_digests = [_digest(key.encode()) for key in config.api_keys]

    @property
    def renderer(self) -> Renderer:
        return self.engine.renderer

    @property
    def max_model_len(self) -> int:
        return self.engine.info.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.engine.info.vocab_size

    def check_alive(self) -> None:
        """Raises a 503 once the engine has died."""
        if not self.engine.is_alive:
            raise ApiError(503, f"the engine has died: {self.engine.dead_reason}", code="engine_dead")

    def check_model(self, model: str | None) -> str:
        """Returns the model's name for the answer; a missing one means the only model. Raises a 404 for another."""
        if model is None:
            return self.model_names[0]
        if model not in self.model_names:
            message = f"the model {model!r} does not exist here; available: {', '.join(self.model_names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    def accepts(self, key: bytes) -> bool:
        """Whether `key` opens this server; takes the same time whichever key is right, if any."""
        digest = _digest(key)
        return any([hmac.compare_digest(digest, known) for known in self._key_digests])

    @property
    def needs_key(self) -> bool:
        return bool(self._key_digests)

    async def abort_running(self) -> None:
        """Aborts every request in the engine; their clients get an error."""
        for request_id in list(self.running):
            with suppress(EngineDeadError):
                await self.engine.abort(request_id)

    async def read_stats(self) -> SchedulerStats:
        """Returns the engine's statistics, the last known ones if it has died."""
        if self.engine.is_alive:
            with suppress(EngineDeadError):  # the health check reports a death; the last counts stay readable
                self.metrics.stats = await self.engine.stats()
        self.metrics.inflight = self.admission.num_inflight
        return self.metrics.stats


def _described_format(config: ServerConfig, renderer: Renderer) -> ToolFormat | None:
    """The form that tools are described in where the template shows none: the model then answers in it."""
    template = renderer.templates and renderer.chat_template(with_tools=True)
    if config.tool_call_parser != AUTO or not template or template.shows_tools:
        return None
    return tool_format("hermes", None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
