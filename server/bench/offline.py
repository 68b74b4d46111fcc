"""One batch over and over, or many requests at once, through `treadle.LLM` in this process."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.ir.errors import ConfigError
from treadle.runtime.engine.llm import LLM
from treadle.runtime.outputs import RequestOutput
from treadle.runtime.sampling_params import SamplingParams
from treadle.server.bench.summary import summarise


@dataclass(frozen=True, kw_only=True)
class OfflineLoad:
    """`num_prompts` requests of random tokens in each repeat; `spread` draws lengths from within that share of them."""

    input_len: int
    output_len: int
    num_prompts: int
    spread: float = 0.0
    warmup: int = 1
    repeats: int = 5
    seed: int = 0

    def check(self, max_model_len: int) -> None:
        """Raises ConfigError if the longest request would not fit."""
        longest = sum(int(length * (1 + self.spread)) for length in (self.input_len, self.output_len))
        if longest > max_model_len:
            raise ConfigError(
                f"requests of up to {longest} tokens exceed the {max_model_len} that the engine serves; "
                "lower --input-len, --output-len or --spread"
            )


def measure_offline(bundle: str, engine: Mapping[str, Any], load: OfflineLoad) -> tuple[dict[str, Any], dict[str, Any]]:
    """(results of `measure`, effective configuration) of a bundle, with these settings of the engine."""
    with LLM(bundle, **engine) as llm:
        return measure(llm, load), effective(llm)


def measure(llm: LLM, load: OfflineLoad) -> dict[str, Any]:
    """Seconds of whole batches, times of single requests, tokens per second. Raises ConfigError for a load that cannot fit."""
    load.check(llm.info.max_model_len)
    draw = random.Random(load.seed)
    for _ in range(load.warmup):
        _run(llm, load, draw)
    runs = [_run(llm, load, draw) for _ in range(load.repeats)]
    return {**_results(runs), "compilations_after_ready": llm.stats().compilations_after_ready}


def effective(llm: LLM) -> dict[str, Any]:
    """The engine's settings and what it decided at its start. Of the bundle's path only the name."""
    engine = dataclasses.asdict(llm.config) | {"bundle": Path(llm.config.bundle).name, "executor": llm.info.executor}
    return {"engine": engine, "model": llm.info.as_dict()}


@dataclass(frozen=True)
class _Run:
    seconds: float
    outputs: Sequence[RequestOutput]

    @property
    def num_input(self) -> int:
        return sum(len(output.prompt_token_ids or ()) for output in self.outputs)

    @property
    def num_output(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)


def _run(llm: LLM, load: OfflineLoad, draw: random.Random) -> _Run:
    """New prompts each time: a prefix that was seen before would cost nothing."""
    prompts = [
        {"prompt_token_ids": [draw.randrange(llm.info.vocab_size) for _ in range(_length(load.input_len, load, draw))]}
        for _ in range(load.num_prompts)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=_length(load.output_len, load, draw), ignore_eos=True)
        for _ in range(load.num_prompts)
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return _Run(time.perf_counter() - start, outputs)


def _length(length: int, load: OfflineLoad, draw: random.Random) -> int:
    return max(1, draw.randint(int(length * (1 - load.spread)), int(length * (1 + load.spread))))


def _results(runs: Sequence[_Run]) -> dict[str, Any]:
    timed = [output.metrics for run in runs for output in run.outputs if output.metrics is not None]
    gaps = [
        (seen.last_token_ts - seen.first_token_ts) / (seen.num_generation_tokens - 1)
        for seen in timed
        if seen.num_generation_tokens > 1
    ]
    return {
        "seconds": summarise([run.seconds for run in runs]),
        "output_tokens_per_second": summarise([run.num_output / run.seconds for run in runs]),
        "total_tokens_per_second": summarise([(run.num_input + run.num_output) / run.seconds for run in runs]),
        "requests_per_second": summarise([len(run.outputs) / run.seconds for run in runs]),
        "ttft_ms": summarise([seen.first_token_latency for seen in timed], 1e3),
        "tpot_ms": summarise(gaps, 1e3),
        "readings_seconds": [round(run.seconds, 6) for run in runs],
        "input_tokens": sum(run.num_input for run in runs),
        "output_tokens": sum(run.num_output for run in runs),
    }
