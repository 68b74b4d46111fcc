"""Every pass by its name, and the small language in which passes are asked for: `a,b{opt=1,other="x"}`.

A row is `name -> "module:Class"`. What runs when nobody asks, and in which order, stands in pipeline.py.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from treadle.ir.config import fits, spell
from treadle.ir.errors import ConfigError
from treadle.ir.registry import Registry
from treadle.passes.base import STAGES, Pass

PASSES = Registry(
    "pass",
    {
        "canonicalise": "treadle.passes.library.canonicalise:Canonicalise",
        "drop_batch_dim": "treadle.passes.library.drop_batch_dim:DropBatchDim",
        "eliminate_dead_code": "treadle.passes.library.eliminate_dead_code:EliminateDeadCode",
        "raise_embedding": "treadle.passes.library.raise_embedding:RaiseEmbedding",
        "raise_linear": "treadle.passes.library.raise_linear:RaiseLinear",
        "raise_addmm": "treadle.passes.library.raise_addmm:RaiseAddmm",
        "raise_layer_norm": "treadle.passes.library.raise_layer_norm:RaiseLayerNorm",
        "raise_rms_norm": "treadle.passes.library.raise_rms_norm:RaiseRmsNorm",
        "raise_rope": "treadle.passes.library.raise_rope:RaiseRope",
        "sink_permutes": "treadle.passes.library.sink_permutes:SinkPermutes",
        "join_slices": "treadle.passes.library.join_slices:JoinSlices",
        "raise_gated_act": "treadle.passes.library.raise_gated_act:RaiseGatedAct",
        "eliminate_common_subexpressions": "treadle.passes.library.eliminate_common_subexpressions:EliminateCommonSubexpressions",
        "fold_constants": "treadle.passes.library.fold_constants:FoldConstants",
        "eliminate_no_ops": "treadle.passes.library.eliminate_no_ops:EliminateNoOps",
        "fuse_add_rms_norm": "treadle.passes.library.fuse_add_rms_norm:FuseAddRmsNorm",
        "fuse_add_layer_norm": "treadle.passes.library.fuse_add_layer_norm:FuseAddLayerNorm",
        "fuse_moe": "treadle.passes.library.fuse_moe:FuseMoe",
        "fuse_norm_rope": "treadle.passes.library.fuse_norm_rope:FuseNormRope",
        "fuse_qkv": "treadle.passes.library.fuse_linears:FuseQkv",
        "fuse_gate_up": "treadle.passes.library.fuse_linears:FuseGateUp",
        "select_logit_rows": "treadle.passes.library.select_logit_rows:SelectLogitRows",
        "shard_tensor_parallel": "treadle.passes.library.shard_tensor_parallel:ShardTensorParallel",
        "fuse_all_reduce_rms_norm": "treadle.passes.library.fuse_all_reduce_rms_norm:FuseAllReduceRmsNorm",
        "overlap_all_reduce": "treadle.passes.library.overlap_all_reduce:OverlapAllReduce",
        "sequence_parallel": "treadle.passes.library.sequence_parallel:SequenceParallel",
        "prepack_weights": "treadle.passes.library.prepack_weights:PrepackWeights",
        "quantize_weights": "treadle.passes.quant.quantize_weights:QuantizeWeights",
        "quantize_activations": "treadle.passes.quant.quantize_activations:QuantizeActivations",
        "fuse_rms_norm_quant": "treadle.passes.quant.fuse_quantize:FuseRmsNormQuant",
        "fuse_add_rms_norm_quant": "treadle.passes.quant.fuse_quantize:FuseAddRmsNormQuant",
        "fuse_gated_act_quant": "treadle.passes.quant.fuse_quantize:FuseGatedActQuant",
        "fuse_attention_quant": "treadle.passes.quant.fuse_attention_quant:FuseAttentionQuant",
        "fuse_all_reduce_rms_norm_quant": "treadle.passes.quant.fuse_quantize:FuseAllReduceRmsNormQuant",
    },
    group="treadle.passes",
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_JSON = json.JSONDecoder()
_VALUES = 'a number, "text", true, false, null or a [list] of them'


def pass_table() -> dict[str, type[Pass]]:
    """Every pass class by name, imported."""
    return {name: pass_class(name) for name in PASSES.names()}


def pass_class(name: str) -> type[Pass]:
    """The class of one pass. Raises ConfigError that lists the names, or says what is wrong with the class."""
    found = PASSES.get(name)
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise ConfigError(f"pass {name!r} is {found!r}, not a subclass of treadle.passes.base.Pass")
    if getattr(found, "name", None) != name:
        raise ConfigError(f"{found.__qualname__} is listed as pass {name!r} but calls itself {getattr(found, 'name', None)!r}")
    if found.stage not in STAGES:
        raise ConfigError(f"pass {name!r} has stage {found.stage!r}; choose one of: {', '.join(STAGES)}")
    return found


def make_pass(name: str, options: Mapping[str, Any] | None = None) -> Pass:
    """A pass with its options. Raises ConfigError for an unknown name or option, listing the known, or a wrong type."""
    made = pass_class(name)
    hints = typing.get_type_hints(made)
    known = {item.name: hints[item.name] for item in fields(made)}
    for option, value in (options or {}).items():
        if option not in known:
            raise ConfigError(f"pass {name!r} has no option {option!r}; {_options_of(known)}")
        if not fits(value, known[option]):
            raise ConfigError(f"pass {name!r}: {option}={value!r} should be {spell(known[option])}")
    try:
        return made(**(options or {}))
    except TypeError as error:
        raise ConfigError(f"pass {name!r} needs more options ({error}); {_options_of(known)}") from error


def _options_of(known: Mapping[str, Any]) -> str:
    if not known:
        return "it takes none"
    return "it takes: " + ", ".join(f"{name} ({spell(hint)})" for name, hint in known.items())


def parse_passes(text: str) -> list[Pass]:
    """Reads `a,b{opt=1,other="x"}`; values are JSON. Raises ConfigError with the position and what may stand there."""
    return _Parser(text).read()


class _Parser:
    """Reads one text from left to right; `_at` is the position of the next character."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0

    def read(self) -> list[Pass]:
        found = [self._pass()]
        while not self._ended():
            self._take(",", "a comma before the next pass, or the end")
            found.append(self._pass())
        return found

    def _pass(self) -> Pass:
        begin = self._skip()
        name = self._name("the name of a pass")
        options = self._options() if self._peek("{") else {}
        try:
            return make_pass(name, options)
        except ConfigError as error:
            raise ConfigError(f"passes {self._text!r}, position {begin}: {error}") from error

    def _options(self) -> dict[str, Any]:
        self._take("{", "{")
        options: dict[str, Any] = {}
        while not self._peek("}"):
            if options:
                self._take(",", "a comma before the next option, or }")
            begin = self._skip()
            name = self._name("the name of an option")
            if name in options:
                raise self._problem(f"option {name!r} is given twice", begin)
            self._take("=", "= and a value")
            options[name] = self._value()
        self._take("}", "}")
        return options

    def _value(self) -> Any:
        begin = self._skip()
        try:
            value, self._at = _JSON.raw_decode(self._text, begin)
        except json.JSONDecodeError as error:
            raise self._problem(f"expected a value: {_VALUES}", begin) from error
        if isinstance(value, dict):
            raise self._problem(f"expected a value: {_VALUES}", begin)
        return _frozen(value)

    def _name(self, what: str) -> str:
        match = _NAME.match(self._text, self._skip())
        if match is None:
            raise self._problem(f"expected {what}", self._at)
        self._at = match.end()
        return match[0]

    def _take(self, mark: str, what: str) -> None:
        if not self._peek(mark):
            raise self._problem(f"expected {what}", self._at)
        self._at += len(mark)

    def _peek(self, mark: str) -> bool:
        return self._text.startswith(mark, self._skip())

    def _ended(self) -> bool:
        return self._skip() == len(self._text)

    def _skip(self) -> int:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._at

    def _problem(self, words: str, position: int) -> ConfigError:
        found = repr(self._text[position]) if position < len(self._text) else "the end"
        return ConfigError(f"passes {self._text!r}, position {position}: {words}, found {found}")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
