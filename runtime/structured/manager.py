"""The structured-output manager, one for each engine: compiles in a pool, keeps what is compiled, fills the masks of a step."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from treadle.ir.errors import ConfigError, UserError
from treadle.runtime.chat.reasoning import reasoning_format
from treadle.runtime.config import EngineConfig
from treadle.runtime.request import Request, RequestStatus
from treadle.runtime.structured.backends import INSTALL, STRUCTURED_BACKENDS, candidates
from treadle.runtime.structured.constraint import (
    JSON,
    REGEX,
    Constraint,
    GrammarError,
    GrammarTimeout,
    check_limits,
)
from treadle.runtime.structured.interface import Backend, BackendOptions, CompiledGrammar
from treadle.runtime.structured.mask import GrammarMask
from treadle.runtime.structured.request_grammar import RequestGrammar
from treadle.runtime.structured.schema_audit import patterns
from treadle.runtime.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

PARALLEL_FILL_ABOVE = 128
"""Masks of more requests than this are filled in parallel; below, starting the jobs costs more than it saves."""

REQUESTS_A_JOB = 16
_MAX_FILL_THREADS = 8
_MAX_REFUSALS = 1024


class Failure(NamedTuple):
    """A request whose constraint could not be compiled, and why."""

    request_id: str
    error: str


class StructuredOutputManager:
    """Nothing is imported or started before the first constrained request.

    `start` is called with each new request; `is_ready` is the scheduler's test whether its wait is over; `take_failures`
    gives those that have to end; `bitmask` is called between the forward and the sampling of a step. All of these come
    from the engine's thread. With `synchronous` compiling happens within `start`, so that engines that are fed the
    same requests see them ready in the same step.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_vocabulary: Callable[[], Vocabulary],
        *,
        synchronous: bool = False,
    ):
        candidates(config.structured_output_backend)  # an unknown name is an error of the start, here and below
        reasoning_format(config.reasoning_parser, None)
        self._config = config
        self._load_vocabulary = load_vocabulary
        self._synchronous = synchronous
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, Backend | None] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._fill_pool: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[Constraint, str] = OrderedDict()
        self._pending: dict[Constraint, Future[CompiledGrammar]] = {}
        self._waiting: dict[str, Constraint] = {}
        self._failures: list[Failure] = []

    # From a request to its grammar

    def start(self, request: Request) -> None:
        """Gives a constrained request its grammar, or lets it wait for it. Raises GrammarError if it can have none."""
        params = request.sampling_params.structured_outputs
        if params is None:
            return
        constraint = params.constraint
        if constraint in self._refused:
            raise GrammarError(self._refused[constraint])
        if constraint not in self._compiled and constraint not in self._pending:
            check_limits(constraint, self._config.structured_output_max_bytes, self._config.structured_output_max_depth)
            if self._synchronous:
                self._keep(constraint, self._compile(constraint))
            else:
                self._pending[constraint] = self._workers().submit(self._compile, constraint)
        if constraint in self._compiled:
            self._attach(request, constraint)
        else:
            self._waiting[request.request_id] = constraint
            request.status = RequestStatus.WAITING_FOR_GRAMMAR

    def is_ready(self, request: Request) -> bool:
        """Whether the wait of a request is over; then it has its grammar."""
        constraint = self._waiting.get(request.request_id)
        if constraint is None or constraint not in self._compiled:
            return False
        del self._waiting[request.request_id]
        self._attach(request, constraint)
        return True

    def forget(self, request_id: str) -> None:
        """A request has ended; one that still waited for its grammar does not any more."""
        self._waiting.pop(request_id, None)

    def collect(self) -> list[Failure]:
        """Takes in what the pool has finished. Returns the waiting requests that cannot have their grammar."""
        for constraint, future in list(self._pending.items()):
            if future.done():
                del self._pending[constraint]
                self._settle(constraint, future)
        failures, self._failures = self._failures, []
        return failures

    def wait(self, seconds: float) -> None:
        """Returns when a compilation has ended, after `seconds` at the latest, at once if none runs."""
        if self._pending:
            wait(self._pending.values(), timeout=seconds, return_when=FIRST_COMPLETED)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    def _settle(self, constraint: Constraint, future: Future[CompiledGrammar]) -> None:
        error = future.exception()
        if error is None:
            self._keep(constraint, future.result())
            return
        if not isinstance(error, UserError):
            logger.error("compiling a grammar failed", exc_info=error)
        text = str(error) if isinstance(error, UserError) else f"compiling failed: {type(error).__name__}: {error}"
        if isinstance(error, GrammarError):  # others, such as a missing package, may be gone with the next request
            self._refused[constraint] = text
            if len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)
        ended = [req_id for req_id, wanted in self._waiting.items() if wanted == constraint]
        for req_id in ended:
            del self._waiting[req_id]
            self._failures.append(Failure(req_id, text))

    def _attach(self, request: Request, constraint: Constraint) -> None:
        self._compiled.move_to_end(constraint)
        reasoner = None if self._config.structured_output_in_reasoning else self._known_vocabulary().reasoner
        request.grammar = RequestGrammar(self._compiled[constraint].start(), request.all_token_ids, reasoner)

    def _keep(self, constraint: Constraint, compiled: CompiledGrammar) -> None:
        """Adds to the cache and drops what was used least recently, but never what someone waits for."""
        self._compiled[constraint] = compiled
        total = sum(grammar.num_bytes for grammar in self._compiled.values())
        wanted = {constraint, *self._waiting.values()}
        for old in list(self._compiled):
            if total <= self._config.structured_output_cache_bytes:
                return
            if old not in wanted:
                total -= self._compiled.pop(old).num_bytes

    # Compiling, in threads of the pool

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_jobs(), thread_name_prefix="grammar")
        return self._pool

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        """The first backend in order that can hold the constraint. One that takes too long is the last that is tried."""
        reasons: list[str] = []
        for name in candidates(self._config.structured_output_backend):
            backend = self._backend(name)
            if backend is None:
                reasons.append(f"{name}: the package {STRUCTURED_BACKENDS.get(name).package} is not installed; run: {INSTALL}")
                continue
            if (reason := backend.unsupported_reason(constraint)) is not None:
                reasons.append(f"{name}: {reason}")
                continue
            try:
                return backend.compile(constraint)
            except GrammarTimeout:
                raise
            except GrammarError as error:
                reasons.append(f"{name}: {_with_culprit(backend, constraint, error)}")
        if all("is not installed" in reason for reason in reasons):
            raise ConfigError(f"structured output needs a grammar library: {'; '.join(reasons)}")
        raise GrammarError(f"{constraint.kind} cannot be compiled: {'; '.join(reasons)}")

    def _backend(self, name: str) -> Backend | None:
        """The backend of a name, made when it is first needed; None if its library is not installed."""
        with self._lock:
            if name not in self._backends:
                if self._vocabulary is None:
                    self._vocabulary = self._load_vocabulary()
                config = self._config
                options = BackendOptions(
                    timeout=config.structured_output_timeout,
                    jobs=num_jobs(),
                    max_whitespace=config.structured_output_max_whitespace,
                )
                made = STRUCTURED_BACKENDS.get(name)
                try:
                    self._backends[name] = made(self._vocabulary, options)
                except ModuleNotFoundError as error:
                    if error.name != made.package:
                        raise
                    return None  # not remembered: it may be installed by the next request
            return self._backends[name]

    # Masks

    def bitmask(self, rows: Sequence[tuple[Request, Sequence[int]]]) -> GrammarMask | None:
        """Masks for the requests that sample in a step, each with its draft tokens; None if no request is constrained."""
        owners = [(request.grammar, drafts) for request, drafts in rows if request.grammar is not None]
        if not owners:
            return None
        vocabulary = self._known_vocabulary()
        counts = [1 + len(drafts) for _, drafts in owners]
        mask = np.full((sum(counts), vocabulary.num_words), -1, dtype=np.int32)
        jobs = list(zip(owners, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
        if len(owners) > PARALLEL_FILL_ABOVE and max(counts) == 1:
            parts = [jobs[start : start + REQUESTS_A_JOB] for start in range(0, len(jobs), REQUESTS_A_JOB)]
            list(self._fillers().map(lambda part: _fill(mask, part), parts))
        else:
            _fill(mask, jobs)
        req_ids = [request.request_id for request, _ in rows if request.grammar is not None]
        return GrammarMask(req_ids, counts, vocabulary.num_words, mask.tobytes())

    def _known_vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None, "a grammar exists, so its vocabulary does"
        return self._vocabulary

    def _fillers(self) -> ThreadPoolExecutor:
        if self._fill_pool is None:
            threads = max(1, min(num_jobs(), _MAX_FILL_THREADS))
            self._fill_pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar-fill")
        return self._fill_pool

    def shutdown(self) -> None:
        """Ends threads and processes. May be called twice."""
        for pool in (self._pool, self._fill_pool):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._fill_pool = None
        for backend in self._backends.values():
            if backend is not None:
                backend.close()
        self._backends.clear()


def num_jobs() -> int:
    """Grammars compiled at once: half the processors that are ours."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _fill(mask: np.ndarray, jobs: Iterable[tuple[tuple[RequestGrammar, Sequence[int]], int]]) -> None:
    """Fills the rows of some requests. A grammar that fails ends its own request, not the others."""
    for (grammar, drafts), first in jobs:
        try:
            grammar.fill_rows(mask, first, drafts)
        except RuntimeError as error:
            grammar.fault = f"the grammar failed: {error}"
            mask[first : first + 1 + len(drafts)] = -1


def _with_culprit(backend: Backend, constraint: Constraint, error: GrammarError) -> str:
    """The compiler's message; of a schema with the keyword at fault in front, if it is a pattern that does not compile."""
    message = str(error).partition(": ")[2]
    if constraint.kind != JSON:
        return message
    schema = json.loads(constraint.source)
    for where, pattern in patterns(schema) if isinstance(schema, Mapping) else ():
        try:
            backend.compile(Constraint(REGEX, pattern))
        except GrammarError:
            return f"{where}: {message}"
    return message
