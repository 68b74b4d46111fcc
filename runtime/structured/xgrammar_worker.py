"""The process in which xgrammar compiles: one fork a request, with a time limit of its own. See `codegen.fork_server`."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from treadle.codegen.fork_server import serve

MAX_MEMORY = 4 << 30
"""Address space that one compilation may add, in bytes."""

MAX_STEP_SECONDS = 0.1
"""A grammar with a slower step would hold up every request of the engine, and steps only get slower."""

WALKS, WALK_TOKENS = 2, 24

_state: dict[str, Any] = {}


def prepare(_: dict[str, Any]) -> None:
    """Imports the library and reads the vocabulary, once for all forks."""
    import xgrammar

    vocabulary = json.loads(Path("vocabulary.json").read_text())
    tokens = [bytes(token) for token in vocabulary["tokens"]]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=vocabulary["stop"]
    )
    _state["compiler"] = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compile(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles in this fork, which the alarm ends when it takes too long; the result goes to a file."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if "compiler" not in _state:
        raise RuntimeError("the library could not be prepared; see what this process logged before")
    compiled = _COMPILE[request["kind"]](_state["compiler"], request["source"], request)
    if (seconds := slowest_step(compiled)) > MAX_STEP_SECONDS:
        return {"error": f"one step of it took {seconds:.1f} s", "slow": True}
    path = Path(f"grammar-{os.getpid()}.json").resolve()
    path.write_text(compiled.serialize_json())
    return {"path": str(path)}


def slowest_step(compiled: Any) -> float:
    """Walks at random through a grammar, as sampling will; the processor time in seconds of the slowest token.

    Repetitions whose parts may overlap make the number of ways to read a text explode, which shows within a few tokens.
    """
    import numpy as np
    import xgrammar

    random, slowest = np.random.default_rng(0), 0.0
    vocab_size = compiled.tokenizer_info.vocab_size
    mask = np.full((1, (vocab_size + 31) // 32), -1, dtype=np.int32)
    for _ in range(WALKS):
        matcher = xgrammar.GrammarMatcher(compiled)
        for _ in range(WALK_TOKENS):
            start = time.process_time()
            matcher.fill_next_token_bitmask(mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], count=vocab_size, bitorder="little"))
            if not len(allowed) or not matcher.accept_token(int(random.choice(allowed))) or matcher.is_terminated():
                break
            slowest = max(slowest, time.process_time() - start)
            if slowest > MAX_STEP_SECONDS:
                return slowest
    return slowest


def _json(compiler: Any, source: str, request: dict[str, Any]) -> Any:
    return compiler.compile_json_schema(source, strict_mode=True, **_whitespace(request))


def _whitespace(request: dict[str, Any]) -> dict[str, Any]:
    most = request["whitespace"]
    return {"any_whitespace": True, "max_whitespace_cnt": most} if most else {"any_whitespace": False, "separators": (",", ":")}


_COMPILE = {
    "json": _json,
    "json_object": lambda compiler, _, request: compiler.compile_json_schema(
        '{"type": "object"}', strict_mode=False, **_whitespace(request)
    ),
    "regex": lambda compiler, source, _: compiler.compile_regex(source),
    "grammar": lambda compiler, source, _: compiler.compile_grammar(source),
    "choice": lambda compiler, source, _: compiler.compile_structural_tag(source),
    "structural_tag": lambda compiler, source, _: compiler.compile_structural_tag(source),
}


if __name__ == "__main__":
    serve({"prepare": prepare, "compile": compile}, inline={"prepare"})
