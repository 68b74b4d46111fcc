"""A Hugging Face folder: config.json, safetensors in one file or in shards, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from treadle.ir.errors import ModelError
from treadle.ir.source import ModelSource
from treadle.ir.sources.build_model import build_from_config, causal_class
from treadle.ir.sources.convert_names import checkpoint_recipes
from treadle.ir.sources.safetensors_index import locate_tensors
from treadle.ir.tokenizer_files import copy_tokenizer
from treadle.ir.weights import Recipe

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class FolderSource(ModelSource):
    kind = "folder"

    def __init__(self, folder: Path):
        self.folder = folder
        self.location = str(folder)
        self.config = _read_config(folder)
        self._located = locate_tensors(folder)
        self.tensors = {name: located.type for name, located in self._located.items()}
        self._files: dict[Path, Any] = {}

    @property
    def architecture(self) -> str:
        return causal_class(self.config, self.location).__name__

    @property
    def generation_config(self) -> dict[str, Any]:
        file = self.folder / "generation_config.json"
        if file.is_file():
            return _read_json(file)
        return special_ids(self.config)

    def read(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        if name not in self._located:
            raise ModelError(f"{self.location}: no tensor {name!r} in the checkpoint")
        file = self._located[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt", device="cpu")
        return self._files[file].get_tensor(name)

    def build(self, dtype: torch.dtype) -> torch.nn.Module:
        return build_from_config(causal_class(self.config, self.location), self.config, dtype)

    def recipes(self, model: torch.nn.Module) -> dict[str, Recipe]:
        return checkpoint_recipes(model, self.tensors)

    def write_tokenizer(self, folder: Path) -> list[str]:
        return copy_tokenizer(self.folder, folder, self.generation_config)


def special_ids(config: Any) -> dict[str, Any]:
    """The special token ids a model configuration states, for models without a generation_config.json."""
    return {name: value for name in SPECIAL_IDS if (value := getattr(config, name, None)) is not None}


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder}: no config.json; a model folder has config.json and safetensors")
    fields = _read_json(file)
    if "auto_map" in fields:
        raise ModelError(
            f"{file} names its own model code (auto_map); only model code of transformers is run"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{file}: transformers cannot read this configuration: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
