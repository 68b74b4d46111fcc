"""QuantKey as text, the recipes that hold one, the arithmetic, and the ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.ir.dtypes import DTYPES
from treadle.ir.errors import ModelError, TreadleError, VerifyError
from treadle.ir.graph import Param
from treadle.ir.infer import infer
from treadle.ir.loader import write_weights
from treadle.ir.ops.registry import dialect
from treadle.ir.quant_key import ELEMENTS, SCALES, QuantKey, parse_quant_key
from treadle.ir.quantize import dequantize_with, quantize_with, scale_of
from treadle.ir.types import tensor
from treadle.ir.weights import Load, QuantizationScale, Quantize, parse_recipe


@st.composite
def keys(draw: st.DrawFn) -> QuantKey:
    group = draw(st.sampled_from([0, 0, 4, 32]))
    plain = draw(st.sampled_from(["per_tensor", "per_channel", "per_token"]))
    element = draw(st.sampled_from(sorted(ELEMENTS)))
    return QuantKey(
        element,
        "per_group" if group else plain,
        group,
        draw(st.booleans()),
        element != "i8" or draw(st.booleans()),
        draw(st.sampled_from(SCALES)),
    )


@given(keys())
def test_text_form_reads_back(key: QuantKey) -> None:
    """R-11.13: a key prints as its name, and the name is the key; in a recipe too."""
    assert parse_quant_key(str(key)) == key
    recipe = Quantize(Load("w"), key)
    assert parse_recipe(str(recipe)) == recipe


@pytest.mark.parametrize(
    "text",
    ["quant(i4, per_tensor)", "quant(i8)", "quant(i8, per_row)", "quant(i8, per_group=0)", "quant(i8, per_tensor, x=1)",
     "quant(f8e4m3, per_tensor, asymmetric)", "quant(i8, per_tensor, per_channel)", "quant()", "quant(i8,"],
)  # fmt: skip
def test_what_is_no_key_is_refused(text: str) -> None:
    """R-11.6: an unknown key is an error; in a recipe it is a ModelError that shows the text."""
    with pytest.raises(VerifyError):
        parse_quant_key(text)
    with pytest.raises(ModelError):
        parse_recipe(f'quantize(load("w"), key={text})')


@pytest.mark.parametrize("element", sorted(ELEMENTS))
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "per_group"])
def test_error_is_at_most_half_a_step(element: str, granularity: str) -> None:
    """int8 rounds by half a scale at most; fp8 e4m3 by a sixteenth of the value, or half its smallest step."""
    key = QuantKey(element, granularity, 4 if granularity == "per_group" else 0)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1, 10, 1e3, 0])[:, None]
    scale = scale_of(x, key)
    back = dequantize_with(quantize_with(x, scale, key), scale, key)
    wide = scale.repeat_interleave(4, -1) if key.group else scale
    allowed = wide / 2 if element == "i8" else torch.maximum(x.abs() / 16, wide * 2**-10)
    assert ((x - back).abs() <= allowed * 1.001).all()
    assert torch.equal(back[4], torch.zeros(8))


def test_too_large_values_saturate() -> None:
    """A static scale that is too small gives the largest element, never infinity or a wrapped sign."""
    x = torch.tensor([[1e6, -1e6]])
    for element, largest in ELEMENTS.items():
        q = quantize_with(x, torch.ones(1, 1), QuantKey(element, "per_tensor"))
        assert q.float().tolist() == [[largest, -largest]]


def test_fakes_say_what_cannot_be_computed() -> None:
    """R-11.20: shapes and types without running; groups that do not fit and zero points are refused."""
    x = tensor("f32", (3, 8))
    key = QuantKey("f8e4m3", "per_group", 4, dynamic=True)
    values = Param("x", x, recipe=Load("x"))
    assert infer("quantize_dynamic", {"x": values}, {"key": key}) == (tensor("f8e4m3", (3, 8)), tensor("f32", (3, 2)))
    for bad in (QuantKey("i8", "per_group", 3), QuantKey("i8", "per_token", symmetric=False)):
        with pytest.raises(TreadleError, match=r"groups of 3|only symmetric"):
            infer("quantize_dynamic", {"x": values}, {"key": bad})


def _ops(key: QuantKey) -> dict[str, dict[str, object]]:
    torch.manual_seed(0)
    x, w, norm = torch.randn(3, 8), torch.randn(6, 8), torch.randn(8)
    token = QuantKey(key.element, "per_token", dynamic=True)
    held = scale_of(x, token)
    q = {"x": quantize_with(x, held, token), "x_scale": held}
    weight = {"weight": quantize_with(w, scale_of(w, key), key), "scale": scale_of(w, key)}
    return {
        "quantize_dynamic": {"x": x, "key": token},
        "quantize_static": {"x": x, "scale": torch.ones(1, 1), "key": QuantKey(key.element, "per_tensor")},
        "dequantize": {"q": weight["weight"], "scale": weight["scale"], "key": key, "dtype": torch.bfloat16},
        "weight_only_linear": {"x": x, **weight, "key": key},
        "scaled_linear": {**q, **weight, "bias": torch.randn(6), "x_key": token, "key": key, "dtype": torch.bfloat16},
        "rms_norm_quant": {"x": x, "weight": norm, "eps": 1e-5, "key": token},
        "add_rms_norm_quant": {"x": x, "residual": x, "weight": norm, "eps": 1e-5, "key": token},
        "gated_act_quant": {"gate": x, "up": x, "act": "silu", "key": token},
    }


@pytest.mark.parametrize("key", [QuantKey("i8", "per_channel"), QuantKey("f8e4m3", "per_group", 4)], ids=str)
@pytest.mark.parametrize("name", sorted(_ops(QuantKey("i8", "per_channel"))))
def test_fake_equals_real(name: str, key: QuantKey) -> None:
    """C11-04, R-11.20: on the meta device each op gives the real shapes and dtypes."""
    arguments = _ops(key)[name]
    reference = dialect()[name].reference
    real = reference(**arguments)
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    fake = reference(**meta)
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (real, fake)), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_stored_and_read_back(tmp_path: Path) -> None:
    """Quantized weights and scales stand in a bundle's safetensors as they are computed."""
    from safetensors.torch import load_file

    class Source:
        location = "memory"

        def read(self, name: str) -> torch.Tensor:
            return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))

    for element in ELEMENTS:
        key = QuantKey(element, "per_channel")
        params = [
            Param("w.quant", tensor(element, (6, 8)), recipe=Quantize(Load("w"), key)),
            Param("w.scale", tensor("f32", (6, 1)), recipe=QuantizationScale(Load("w"), key)),
        ]
        write_weights(params, Source(), tmp_path / element)  # type: ignore[arg-type]
        stored = load_file(next((tmp_path / element).iterdir()))
        assert stored["w.quant"].dtype == DTYPES[element].torch
        back = dequantize_with(stored["w.quant"], stored["w.scale"], key)
        assert torch.allclose(back, Source().read("w"), atol=0.1)
