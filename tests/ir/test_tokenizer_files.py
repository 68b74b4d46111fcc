"""Tokenizer files for serving without transformers, and conversion of in-place calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from treadle.ir.from_export import convert
from treadle.ir.functionalize import needs_functionalization
from treadle.ir.interpret import run
from treadle.ir.tokenizer_files import copy_tokenizer
from treadle.ir.weights import Load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(source / "tokenizer.json"))
    return source


def test_files_are_copied_and_completed(folder: Path, tmp_path: Path) -> None:
    """C02: a template in tokenizer_config.json becomes chat_template.jinja; special tokens and defaults are written."""
    config = {"bos_token": "a", "eos_token": {"content": "b"}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    names = copy_tokenizer(folder, tmp_path / "out", {"eos_token_id": [1, 0]})
    assert names == [
        "chat_template.jinja",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    out = tmp_path / "out"
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((out / "special_tokens_map.json").read_text()) == {
        "bos_token": "a",
        "eos_token": {"content": "b"},
    }
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [1, 0]}
    assert Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size() == 2


def test_template_file_wins_and_lists_give_their_default(folder: Path, tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    copy_tokenizer(folder, tmp_path / "list", {})
    assert (tmp_path / "list" / "chat_template.jinja").read_text() == "d"
    (folder / "chat_template.jinja").write_text("file")
    copy_tokenizer(folder, tmp_path / "file", {})
    assert (tmp_path / "file" / "chat_template.jinja").read_text() == "file"


def test_folder_without_tokenizer_gives_none(tmp_path: Path) -> None:
    """A model may be served on token ids alone."""
    assert copy_tokenizer(tmp_path, tmp_path / "out", {}) == []


class InPlace(torch.nn.Module):
    def __init__(self, through_view: bool):
        super().__init__()
        self.through_view = through_view

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + 1
        before = z * 2
        (z[:, :2] if self.through_view else z).div_(2.0)
        return before + z


@pytest.mark.parametrize("through_view", [False, True])
def test_calls_in_place_become_functional(through_view: bool) -> None:
    """A fresh tensor changed in place is read changed afterwards only; a view needs torch's functionalisation."""
    module = InPlace(through_view)
    tokens = torch.export.Dim("T", min=1, max=8)
    example = (torch.randn(3, 4), torch.randn(3))
    program = torch.export.export(module, example, dynamic_shapes=({0: tokens}, {0: tokens}), strict=False)
    assert needs_functionalization(program.graph) is through_view
    if through_view:
        program = program.run_decompositions({})
    graph = convert(program, "g", ["x", "y"], lambda name: (name, Load(name)), (1, 8), "")
    x = torch.randn(5, 4)
    torch.testing.assert_close(run(graph, [x, torch.zeros(5)], [])[0], module(x, x))
