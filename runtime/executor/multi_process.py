"""The executor of a model cut over ranks: rank 0 in this process, each other rank in a process of its own.

All ranks follow the same scheduler outputs and sample the same tokens; rank 0's are the answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from treadle.codegen.bundle import open_bundle
from treadle.ir import errors
from treadle.ir.errors import ConfigError, EngineDeadError, UserError
from treadle.runtime.config import EngineConfig
from treadle.runtime.executor.interface import Executor, WorkerInfo
from treadle.runtime.executor.rank_messages import RankCall, RankMessage, RankReply, RankStart
from treadle.runtime.executor.threads import default_num_threads, thread_environment
from treadle.runtime.executor.worker import Worker
from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.structured.mask import GrammarMask

START_SECONDS = 120.0
EXIT_SECONDS = 5.0
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from treadle.runtime.executor.rank_process import main; main(int(sys.argv[2]))"
)


class RankClient:
    """One other rank as seen from rank 0."""

    def __init__(self, rank: int, num_threads: int):
        self.rank = rank
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **thread_environment(num_threads)},
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankReply)

    def send(self, message: RankMessage) -> None:
        """Sends a message. Raises EngineDeadError with the reason if the rank is gone."""
        try:
            self._connection.send_bytes(self._encoder.encode(message))
        except OSError as error:
            raise EngineDeadError(self.ended()) from error

    def receive(self, seconds: float | None = None) -> RankReply:
        """The next reply. Raises what the rank reports, or EngineDeadError if it is gone or silent."""
        try:
            if seconds is not None and not self._connection.poll(seconds):
                raise EngineDeadError(f"rank {self.rank} did not answer within {seconds:.0f} s")
            reply: RankReply = self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineDeadError(self.ended()) from error
        if reply.error is not None:
            raise self._error(reply)
        return reply

    def raise_reason(self) -> None:
        """Raises what the rank reports or how it ended, if it does one of these soon."""
        if self._connection.poll(EXIT_SECONDS):
            self.receive()

    def _error(self, reply: RankReply) -> Exception:
        kind = getattr(errors, reply.user_error or "", None)
        if isinstance(kind, type) and issubclass(kind, UserError):
            return kind(f"rank {self.rank}: {reply.error}")
        return EngineDeadError(f"rank {self.rank} failed: {reply.error}")

    def ended(self) -> str:
        """Says how the process ended; waits a moment for it, as a connection closes before its process is gone."""
        try:
            status = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} (process {self.process.pid}) hung up"
        cause = f"signal {-status}" if status < 0 else f"status {status}"
        return f"rank {self.rank} (process {self.process.pid}) ended with {cause}"

    def close(self) -> None:
        """Hangs up, which ends the process; kills it if it does not end by itself."""
        self._connection.close()
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class MultiProcessExecutor(Executor):
    """The number of ranks is the bundle's. Threads are shared out: each rank gets its part of the processors."""

    def __init__(self, config: EngineConfig):
        self._world = open_bundle(config.bundle, verify_key=config.verify_key).manifest.num_ranks
        if self._world == 1:
            raise ConfigError(
                f"executor 'mp' runs a model that is cut over ranks, and {Path(config.bundle).name} is not; "
                "leave executor out, or compile with --tensor-parallel-size 2"
            )
        threads = config.num_threads or max(1, default_num_threads() // self._world)
        super().__init__(replace(config, num_threads=threads))
        self._others: list[RankClient] = []
        self._worker: Worker | None = None
        self._folder = ""

    def start(self) -> WorkerInfo:
        try:
            return self._start()
        except BaseException:
            self.shutdown()
            raise

    def _start(self) -> WorkerInfo:
        from treadle.runtime.executor.gloo_group import GlooGroup
        from treadle.runtime.runner.load_bundle import load_bundle

        assert self.config.num_threads is not None
        self._others = [RankClient(rank, self.config.num_threads) for rank in range(1, self._world)]
        for other in self._others:
            other.receive(START_SECONDS)  # it has imported what it needs: from here on nothing should stop it
        self._folder = tempfile.mkdtemp(prefix="treadle-ranks-")
        meeting = Path(self._folder) / "meeting"
        plain = {**dataclasses.asdict(self.config), "executor": "uni"}
        for other in self._others:
            start = RankStart(config=plain, rank=other.rank, world=self._world, meeting_file=str(meeting))
            other.send(start)
        group = GlooGroup(meeting, 0, self._world)
        self._worker = Worker(self.config, lambda config: load_bundle(config, group), num_ranks=self._world)
        info = self._worker.start()
        self._receive_all()
        call = RankCall(method="start", num_blocks=info.plan.num_blocks, max_model_len=info.plan.max_model_len)
        self._send_all(call)
        self._receive_all()
        return info

    def _send_all(self, message: RankMessage) -> None:
        for other in self._others:
            other.send(message)

    def _receive_all(self) -> list[RankReply]:
        return [other.receive() for other in self._others]

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls it on every rank at the same time. The only arguments that cross to other ranks are a step or a mask."""
        assert self._worker is not None, "the executor was shut down"
        sent = args[0] if args else None
        assert len(args) <= 1 and isinstance(sent, SchedulerOutput | GrammarMask | None), f"{method} cannot cross to another rank"
        if isinstance(sent, GrammarMask):
            self._send_all(RankCall(method=method, mask=sent))
        else:
            self._send_all(RankCall(method=method, step=sent))
        try:
            first = getattr(self._worker, method)(*args)
        except RuntimeError:  # gloo's, when a rank hangs up within a collective
            for other in self._others:
                other.raise_reason()
            raise
        replies = self._receive_all()
        return [first, *(reply.value if reply.output is None else reply.output for reply in replies)]

    def sample_tokens(self, mask: GrammarMask | None = None) -> RunnerOutput:
        first, *others = self.collective_rpc("sample_tokens", mask)
        for rank, output in enumerate(others, 1):
            if output.sampled_token_ids != first.sampled_token_ids:
                raise EngineDeadError(f"rank {rank} sampled other tokens than rank 0; their caches no longer agree")
        return first

    def check_health(self) -> None:
        """Raises EngineDeadError with the reason if a rank's process has ended; asks nobody."""
        for other in self._others:
            if other.process.poll() is not None:
                raise EngineDeadError(other.ended())

    def shutdown(self) -> None:
        self._worker = None
        others, self._others = self._others, []
        for other in others:
            other.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
