"""Graphs as files for the commands that work on text: reading one with errors that name the file, showing reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.ir.errors import ConfigError, ModelError, VerifyError
from treadle.ir.graph import Graph
from treadle.passes.base import Pass, PassReport


def read_graph(path: Path) -> Graph:
    """The graph in a text file. Raises VerifyError with file and line for text that is not one graph."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise VerifyError(f"{path}: not a text file: {error.reason} at byte {error.start}") from error
    if re.search(r"^program @", text, re.M):
        raise VerifyError(
            f"{path}: this is a program over pieces, and passes work on a graph; take a stage up to `fused`, or one piece"
        )
    from treadle.ir.text import parse_graph

    try:
        return parse_graph(text)
    except (VerifyError, ModelError) as error:
        raise VerifyError(f"{path}: {error}") from error


def choose_passes(passes: str | None, pipeline: bool) -> list[Pass]:
    """The passes that were asked for, `a,b{opt=1}`, or all of the pipeline. Raises ConfigError for both."""
    from treadle.passes.base import STAGES
    from treadle.passes.pipeline import PipelineOptions, plan_pipeline
    from treadle.passes.registry import parse_passes

    if passes is not None and pipeline:
        raise ConfigError("give either --passes or --pipeline, not both")
    if pipeline:
        plan = plan_pipeline(PipelineOptions())
        return [step for stage in STAGES for step in plan[stage]]
    return parse_passes(passes) if passes else []


def report_lines(reports: Sequence[PassReport]) -> Iterator[str]:
    """Each pass with its matches by kind, its near misses in full, and its warning."""
    yield "passes (matches, near misses)"
    for report in reports:
        counts = ", ".join(f"{kind} {number}" for kind, number in report.counts.items())
        name = report.spec or report.name
        yield f"  {name:<36}{report.matched:>5}{len(report.near_misses):>5}  {counts}".rstrip()
        for miss in report.near_misses:
            where = f"   // {miss.source}" if miss.source else ""
            yield f"      near miss: {miss.node}{where}"
            yield f"        {miss.predicate}"
        if report.warning:
            yield f"      warning: {report.warning}"
