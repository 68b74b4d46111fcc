"""Traces a model into the IR: torch.export on the meta device, with the number of tokens as the only symbol."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from treadle.ir.adapters import ADAPTERS
from treadle.ir.buffers import code_buffers
from treadle.ir.errors import ModelError, TraceError
from treadle.ir.from_export import convert
from treadle.ir.functionalize import needs_functionalization
from treadle.ir.graph import Graph
from treadle.ir.source import ModelSource
from treadle.ir.sources.convert_names import nearest_names
from treadle.ir.sources.tied_weights import canonical_names, untie_different
from treadle.ir.trace_interfaces import MaskNote, Notes, check_masks, noting
from treadle.ir.trace_source import failure_source
from treadle.ir.types import DTYPES
from treadle.ir.verify import verify
from treadle.ir.weights import Literal, Recipe

_EXAMPLE_TOKENS = 7  # any number above 1 that is no other size of the model
PREFIX = "model_under_trace."


def trace(source: ModelSource, *, dtype: str = "f32", max_tokens: int = 8192) -> Graph:
    """The graph of one step: `input_ids` and `positions` i64[T], `kv.<layer>`, `batch` -> logits [T, V].

    `dtype` is the type of parameters and activations (f32, bf16, f16); `max_tokens` bounds T. Raises TraceError
    for a construct that cannot be traced, ModelError for a parameter that the checkpoint cannot fill.
    """
    _refuse_quantized(source)
    model = source.build(DTYPES[dtype].torch)
    if source.architecture in ADAPTERS:
        ADAPTERS.get(source.architecture)(model)
    recipes = source.recipes(model)
    untie_different(model, recipes, source)
    buffers = code_buffers(model)
    wrapper = _wrap(model)
    with noting() as notes:
        program = _export(wrapper, model, source.architecture, max_tokens)
    _check_attention(notes, model, source.architecture)
    canonical = canonical_names(model, recipes)

    def resolve(name: str) -> tuple[str, Recipe]:
        name = canonical.get(name, name)
        if name in buffers and name not in recipes:
            return name, Literal.of(buffers[name])
        if name not in recipes:
            raise _missing(name, source)
        return name, recipes[name]

    graph = convert(
        program, _graph_name(source), ["input_ids", "positions"], resolve, (1, max_tokens), PREFIX
    )
    verify(graph, after="trace")
    return graph


def unused_tensors(graph: Graph, source: ModelSource) -> list[str]:
    """Checkpoint tensors that no parameter of the graph reads, sorted."""
    used = {name for param in graph.params for name in param.recipe.sources()}
    return sorted(set(source.tensors) - used)


class _CausalStep(nn.Module):
    """A transformers causal language model as a step over T tokens without a batch dimension."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model_under_trace = model

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.model_under_trace(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        return out.logits.squeeze(0)


class _PlainStep(nn.Module):
    """A module of the user's own: called with input_ids [T] and positions [T], returns logits [T, V]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model_under_trace = model

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model_under_trace(input_ids, positions)


def _wrap(model: nn.Module) -> nn.Module:
    from transformers import PreTrainedModel

    return _CausalStep(model) if isinstance(model, PreTrainedModel) else _PlainStep(model)


def _export(wrapper: nn.Module, model: nn.Module, architecture: str, max_tokens: int) -> Any:
    device = next((p.device for p in model.parameters()), torch.device("meta"))
    example = tuple(torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device=device) for _ in range(2))
    tokens = torch.export.Dim("T", min=1, max=max_tokens)
    with torch.no_grad(), _explained(model, architecture), _uncollected():
        program = torch.export.export(
            wrapper, example, dynamic_shapes=({0: tokens}, {0: tokens}), strict=False
        )
        return program.run_decompositions({}) if needs_functionalization(program.graph) else program


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection for a while: export keeps what it makes, and looking for garbage takes a fifth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _explained(model: nn.Module, architecture: str) -> Iterator[None]:
    """Turns whatever stops torch.export into a TraceError with construct, place and remedy."""
    try:
        yield
    except TraceError as error:
        path, line = failure_source(error.__traceback__, model)
        raise TraceError(f"{architecture} cannot be traced: {error}{_place(path, line)}") from error
    except Exception as error:
        path, line = failure_source(error.__traceback__, model)
        what, remedy = _diagnose(error)
        place = _place(path, line) if path or line else _attention_class(model)
        raise TraceError(f"{architecture} cannot be traced: {what}{place}. {remedy}") from error


def _place(path: str, line: str) -> str:
    return f", at {line or 'an unknown line'} in module {path or '(the model itself)'}"


def _diagnose(error: Exception) -> tuple[str, str]:
    about = str(error).partition(" For more information")[0]
    first = next((text.strip() for text in about.splitlines() if text.strip()), type(error).__name__)
    if MaskNote.__name__ in str(error):
        return (
            "its attention computes with the mask itself instead of calling transformers' attention interface",
            "A dense fallback would be wrong for batches; the model code must go through ALL_ATTENTION_FUNCTIONS",
        )
    kinds = " ".join(cls.__name__ for cls in type(error).__mro__)
    if "DataDependent" in kinds or "data-dependent" in str(error) or "Tensor.item" in str(error):
        return (
            f"control flow depends on the values of a tensor ({first})",
            "Write the choice as torch.where, or as a mask, so that every input takes the same path",
        )
    if "Constraint" in str(error) or "specializ" in str(error):
        return (
            f"the code fixes the number of tokens ({first})",
            "Layers that keep state between tokens (Mamba, convolution, linear attention) are not supported",
        )
    return (
        f"{type(error).__name__}: {first}",
        "Rewrite the construct so that torch.export(strict=False) accepts it",
    )


def _check_attention(notes: Notes, model: nn.Module, architecture: str) -> None:
    """Every layer must have met the attention interface exactly once, under a mask we can honour."""
    check_masks(notes, architecture)
    if len(set(notes.layers)) != len(notes.layers):
        repeated = sorted({layer for layer in notes.layers if notes.layers.count(layer) > 1})
        raise TraceError(
            f"{architecture} calls attention more than once for layer {repeated}; each needs a number"
        )
    config = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None and notes.layers:
        return
    if layers is None:
        raise TraceError(
            f"{architecture} never calls treadle.ir.trace_interfaces.attend, so it has no KV cache to serve"
        )
    if len(notes.layers) != layers:
        raise TraceError(
            f"{architecture} has {layers} layers but {len(notes.layers)} of them call the attention interface "
            f"of transformers{_attention_class(model)}. Attention that bypasses the interface, and layers that keep "
            "another state than keys and values, cannot be served; a dense fallback would be wrong for batches"
        )


def _attention_class(model: nn.Module) -> str:
    """` (its attention is BloomAttention at modeling_bloom.py:120)` if such a module can be found."""
    import inspect

    for path, module in model.named_modules():
        name = type(module).__name__
        if "attention" in name.lower() or "mixer" in name.lower():
            file = inspect.getsourcefile(type(module)) or "?"
            return f" (module {path} is a {name}, {file}:{inspect.getsourcelines(type(module))[1]})"
    return ""


def _missing(name: str, source: ModelSource) -> ModelError:
    near = nearest_names(name, source.tensors)
    hint = f"; the nearest names there are {', '.join(near)}" if near else ""
    return ModelError(f"{source.location}: the checkpoint has no tensor for parameter {name}{hint}")


def _refuse_quantized(source: ModelSource) -> None:
    scheme: Mapping[str, Any] | None = getattr(source.config, "quantization_config", None)
    if scheme:
        method = scheme.get("quant_method", "?") if isinstance(scheme, Mapping) else type(scheme).__name__
        raise ModelError(
            f"{source.location}: the checkpoint is quantized ({method}), which is not supported here"
        )


def _graph_name(source: ModelSource) -> str:
    name = "".join(c if c.isalnum() else "_" for c in source.architecture)
    return name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower() or "model"
