"""Running recipes over a source, and writing the results so that they can be mapped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from treadle.ir.errors import ModelError
from treadle.ir.graph import Param
from treadle.ir.loader import load_params, write_weights
from treadle.ir.source import open_source
from treadle.ir.types import tensor
from treadle.ir.weights import Load, Slice, Transpose


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.arange(15.0).reshape(3, 5))
        self.b = torch.nn.Parameter(torch.arange(7.0))


PARAMS = [
    Param("first", tensor("f32", (3, 5)), recipe=Load("a")),
    Param("turned", tensor("bf16", (5, 3)), recipe=Transpose(Load("a"))),
    Param("odd", tensor("f32", (7,)), recipe=Load("b")),
    Param("same", tensor("f32", (3, 5)), recipe=Load("a")),
    Param("part", tensor("f32", (2,)), recipe=Slice(Load("b"), 0, 1, 3)),
]


def test_tensors_are_cast_and_contiguous() -> None:
    loaded = dict(load_params(PARAMS, open_source(Weights())))
    assert list(loaded) == [p.name for p in PARAMS]
    assert torch.equal(loaded["turned"], torch.arange(15.0).reshape(3, 5).T.bfloat16())
    assert all(value.is_contiguous() for value in loaded.values())


def test_params_are_loaded_one_at_a_time() -> None:
    """A caller that keeps nothing never makes the loader read ahead."""
    source = open_source(Weights())
    read: list[str] = []
    original = source.read
    source.read = lambda name: read.append(name) or original(name)  # type: ignore[method-assign]
    stream = load_params(PARAMS, source)
    assert read == []
    next(stream)
    assert read == ["a"]
    next(stream)
    next(stream)
    assert read == ["a", "a", "b"]


def test_wrong_shape_names_both() -> None:
    wrong = Param("first", tensor("f32", (5, 3)), recipe=Load("a"))
    with pytest.raises(ModelError, match=r"first must be f32\[5,3\].*\[3,5\]"):
        list(load_params([wrong], open_source(Weights())))


def test_recipe_that_cannot_be_computed_is_named() -> None:
    wrong = Param("cut", tensor("f32", (9,)), recipe=Slice(Load("b"), 0, 0, 9))
    with pytest.raises(ModelError, match="cut = slice"):
        list(load_params([wrong], open_source(Weights())))


def test_written_files_are_safetensors_aligned_and_without_repeats(tmp_path: Path) -> None:
    index = write_weights(PARAMS, open_source(Weights()), tmp_path)
    assert index == dict.fromkeys((p.name for p in PARAMS), "weights-00000.safetensors")
    file = tmp_path / "weights-00000.safetensors"
    stored = load_file(file)
    expected = dict(load_params(PARAMS, open_source(Weights())))
    assert "same" not in stored
    for name in ("first", "turned", "odd", "part"):
        assert torch.equal(stored[name], expected[name])
        assert stored[name].dtype == expected[name].dtype
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    assert (8 + length) % 64 == 0
    assert all(header[name]["data_offsets"][0] % 64 == 0 for name in ("first", "turned", "odd", "part"))
    with safe_open(file, framework="pt") as opened:
        assert json.loads(opened.metadata()["aliases"]) == {"first": ["same"]}


def test_shards_are_cut_by_size(tmp_path: Path) -> None:
    index = write_weights(PARAMS, open_source(Weights()), tmp_path, shard_bytes=64)
    assert len(set(index.values())) == 3
    assert index["same"] == index["first"] != index["odd"]
    stored = {
        name: value for file in set(index.values()) for name, value in load_file(tmp_path / file).items()
    }
    assert torch.equal(stored["odd"], torch.arange(7.0))
