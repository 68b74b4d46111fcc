"""treadle: a compiler-centric engine for large language models. The public API, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.codegen.compile import compile
    from treadle.runtime.engine.llm import LLM
    from treadle.runtime.outputs import CompletionOutput, RequestOutput
    from treadle.runtime.sampling_params import SamplingParams
    from treadle.runtime.structured.constraint import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "compile"]

_HOMES = {
    "LLM": "treadle.runtime.engine.llm",
    "SamplingParams": "treadle.runtime.sampling_params",
    "StructuredOutputsParams": "treadle.runtime.structured.constraint",
    "RequestOutput": "treadle.runtime.outputs",
    "CompletionOutput": "treadle.runtime.outputs",
    "compile": "treadle.codegen.compile",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}; it offers {', '.join(sorted(_HOMES))}")
    return getattr(import_module(_HOMES[name]), name)
