"""Rewrites the golden files of this room: `python -m tests.passes.update_golden`. Read the difference before keeping it."""

from __future__ import annotations

import json

from tests.passes import test_quant as quant
from tests.passes import test_tensor_parallel as parallel
from tests.passes.cases import CASES
from tests.passes.harness import ARCHITECTURES, GOLDEN, apply, match_counts, traced
from treadle.ir.text import print_graph
from treadle.passes.pipeline import run_pipeline


def main() -> None:
    (GOLDEN / "passes").mkdir(exist_ok=True)
    for case in (*CASES, *parallel.CASES, *quant.CASES):
        graph, _ = apply(case.step, case.before)
        case.golden.write_text(print_graph(graph))
    counts = {}
    for name in (*ARCHITECTURES, "smollm2"):
        stages = run_pipeline(traced(name))
        counts[name] = {"pieces": list(stages.unified.pieces), "matches": match_counts(stages.reports)}
    (GOLDEN / "match_counts.json").write_text(json.dumps(counts, indent=1) + "\n")
    collectives = {name: parallel.collective_counts(name) for name in ARCHITECTURES}
    (GOLDEN / "collectives.json").write_text(json.dumps(collectives, indent=1) + "\n")


if __name__ == "__main__":
    main()
