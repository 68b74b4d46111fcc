"""A rank other than the first, as a process of its own: answers the calls of rank 0 one by one until it hangs up."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from treadle.ir.config import resolve
from treadle.ir.errors import UserError
from treadle.runtime.config import EngineConfig
from treadle.runtime.executor.rank_messages import RankCall, RankMessage, RankReply, RankStart
from treadle.runtime.executor.worker import Worker
from treadle.runtime.runner.model import LoadedModel
from treadle.runtime.runner_output import RunnerOutput

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RankMessage)


class Rank:
    """The state of one rank: its loaded model, then its worker."""

    def __init__(self) -> None:
        self._config: EngineConfig | None = None
        self._model: LoadedModel | None = None
        self._worker: Worker | None = None

    def answer(self, message: RankMessage) -> RankReply:
        """Does what is asked. Raises whatever goes wrong."""
        if isinstance(message, RankStart):
            self._load(message)
            return RankReply()
        if message.method == "start":
            return RankReply(value=self._start(message))
        assert self._worker is not None, "start comes first"
        method = getattr(self._worker, message.method)
        argument = message.step if message.step is not None else message.mask
        value = method(argument) if argument is not None else method()
        return RankReply(output=value) if isinstance(value, RunnerOutput) else RankReply(value=value)

    def _load(self, start: RankStart) -> None:
        from treadle.runtime.executor.gloo_group import GlooGroup
        from treadle.runtime.runner.load_bundle import load_bundle

        self._config = resolve(EngineConfig, start.config).config
        group = GlooGroup(Path(start.meeting_file), start.rank, start.world)
        self._model = load_bundle(self._config, group)

    def _start(self, call: RankCall) -> int:
        """Takes as many blocks as rank 0, for block numbers are the same everywhere; returns their number."""
        config, model = self._config, self._model
        assert config is not None and model is not None, "the model is loaded first"
        same = replace(config, num_blocks=call.num_blocks, max_model_len=call.max_model_len)
        self._worker = Worker(same, lambda _: model)
        return self._worker.start().plan.num_blocks


def serve(connection: Connection) -> int:
    """Answers until the connection ends. Returns the exit status: after an error nothing more is answered."""
    rank = Rank()
    connection.send_bytes(_ENCODER.encode(RankReply()))
    while True:
        try:
            message: Any = _DECODER.decode(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return 0
        try:
            reply = rank.answer(message)
        except Exception as error:
            kind = type(error).__name__
            text, user_error = (str(error), kind) if isinstance(error, UserError) else (f"{kind}: {error}", None)
            connection.send_bytes(_ENCODER.encode(RankReply(error=text, user_error=user_error)))
            return 1
        connection.send_bytes(_ENCODER.encode(reply))


def main(descriptor: int) -> None:
    """Entry point of the child process; `descriptor` is its end of the socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager ends the group: rank 0 drains, then hangs up
    os._exit(serve(Connection(descriptor)))  # no teardown of torch, as in the engine core
