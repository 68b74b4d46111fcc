"""Compile time against depth: SmolLM2's shape with 2, 30 and 60 layers, cold store each, in one run.

    python -m benchmarks.compile_depth [--output results.json]

Prints seconds for each stage and the ratio to 2 layers of everything beyond tracing and writing weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

import treadle
from treadle.codegen.bundle import open_bundle

DEPTHS = (2, 30, 60)
DEPTH_BOUND = ("read config", "trace", "write bundle")
"""Stages that read or write every layer and are not compiling."""


def model(layers: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    return made.to_empty(device="cpu")


def measure(layers: int) -> dict[str, float]:
    """Stage name -> seconds of one cold compile."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = treadle.compile(model(layers), Path(folder) / "m.bundle", store=Path(folder) / "store", dtype="float32")
        return {time.stage: time.seconds for time in open_bundle(bundle).manifest.times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {layers: measure(layers) for layers in DEPTHS}
    beyond = {n: sum(s for stage, s in times.items() if stage not in DEPTH_BOUND) for n, times in results.items()}
    for layers, times in results.items():
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in times.items())
        print(f"{layers:3d} layers: beyond tracing {beyond[layers]:.1f} s, {beyond[layers] / beyond[2]:.2f} of 2 layers ({stages})")
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
