"""Where a traced call stands in the model: module path and line of model source."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

from treadle.ir.graph import Source

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_FOREIGN = tuple(
    str(folder)
    for folder in (Path(torch.__file__).parent, Path(__file__).resolve().parent, Path(__file__).parent)
)
_PLUMBING = (
    "integrations/",
    "modeling_utils.py",
    "masking_utils.py",
    "utils/generic.py",
    "modeling_layers.py",
)


def is_model_file(file: str) -> bool:
    """Whether a source file holds model code, not torch's, treadle's or transformers' plumbing."""
    inside = file.rpartition("/transformers/")[2]
    return not file.startswith((*_FOREIGN, "<")) and not inside.startswith(_PLUMBING)


def node_source(node: fx.Node, prefix: str) -> Source:
    """Module path without `prefix`, and file:line of the innermost frame in model code."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = path.removeprefix(prefix.rstrip(".")).removeprefix(".")
    frames = [(f, n) for f, n in _FRAME.findall(node.meta.get("stack_trace") or "") if is_model_file(f)]
    return Source(path, f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else "")


def failure_source(trace: TracebackType | None, model: torch.nn.Module) -> tuple[str, str]:
    """For an exception: (module path, file:line) of the innermost frame in model code, '' if there is none."""
    paths = {id(module): path for path, module in model.named_modules()}
    path, line = "", ""
    while trace is not None:
        frame = trace.tb_frame
        if id(frame.f_locals.get("self")) in paths:
            path = paths[id(frame.f_locals["self"])]
        if is_model_file(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return path, line
