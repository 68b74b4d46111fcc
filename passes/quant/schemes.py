"""What `--quantization` can name: a scheme is a list of passes with options, added to the pipeline.

A row is `name -> "module:attribute"`, where the attribute is a Scheme.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir.errors import ConfigError
from treadle.ir.registry import Registry


@dataclass(frozen=True)
class Scheme:
    """`passes` in the syntax of the pass registry, in order of running. `doc` is one line for people."""

    passes: tuple[str, ...]
    doc: str


_FUSIONS = ("fuse_rms_norm_quant", "fuse_add_rms_norm_quant", "fuse_gated_act_quant", "fuse_all_reduce_rms_norm_quant")

INT8_WEIGHT_ONLY = Scheme(
    ('quantize_weights{element="i8",head=true}',), "weights of linears in int8 with a scale for each output channel"
)
FP8_WEIGHT_ONLY = Scheme(
    ('quantize_weights{element="f8e4m3"}',), "weights of linears in fp8 (e4m3) with a scale for each output channel"
)
INT8 = Scheme(
    # one scale for a whole token would let its outliers round the rest away: SmolLM2's perplexity rises by 4 %, not 0.6 %
    ('quantize_weights{element="i8"}', "quantize_activations{group=64}", *_FUSIONS),
    "int8 weights, and activations in int8 with a scale for each 64 values of a token",
)
FP8 = Scheme(
    (*FP8_WEIGHT_ONLY.passes, "quantize_activations", *_FUSIONS),
    "fp8 (e4m3) weights, and activations in fp8 with a scale for each token",
)

SCHEMES = Registry(
    "quantization scheme",
    {
        "int8": "treadle.passes.quant.schemes:INT8",
        "int8_weight_only": "treadle.passes.quant.schemes:INT8_WEIGHT_ONLY",
        "fp8": "treadle.passes.quant.schemes:FP8",
        "fp8_weight_only": "treadle.passes.quant.schemes:FP8_WEIGHT_ONLY",
    },
    group="treadle.quantization_schemes",
)


def scheme_passes(name: str | None) -> tuple[str, ...]:
    """The passes of a scheme; none for None. Raises UserError listing the schemes for an unknown name."""
    if name is None:
        return ()
    scheme = SCHEMES.get(name)
    if not isinstance(scheme, Scheme):
        raise ConfigError(f"quantization scheme {name!r} is {scheme!r}, not a treadle.passes.quant.schemes.Scheme")
    return scheme.passes
