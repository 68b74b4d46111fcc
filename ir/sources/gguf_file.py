"""A GGUF file. Tensors are dequantized one at a time to float32, with the numbers that gguf-py gives."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from treadle.ir.errors import ModelError
from treadle.ir.source import ModelSource
from treadle.ir.sources.build_model import build_from_config, causal_class
from treadle.ir.sources.gguf_config import gguf_config
from treadle.ir.sources.gguf_header import read_gguf
from treadle.ir.sources.gguf_names import check_architecture, gguf_recipes
from treadle.ir.sources.hf_folder import special_ids
from treadle.ir.tokenizer_files import save_tokenizer
from treadle.ir.types import tensor
from treadle.ir.weights import Recipe


class GgufSource(ModelSource):
    kind = "gguf"

    def __init__(self, file: Path):
        self.file = file
        self.location = str(file)
        header = read_gguf(file)
        self.metadata, self._stored = header.metadata, header.tensors
        self.gguf_architecture = str(self.metadata.get("general.architecture"))
        check_architecture(self.gguf_architecture, self.location)
        self._refuse_scaled_rope()
        self.tensors = {name: tensor("f32", stored.shape) for name, stored in self._stored.items()}

    @cached_property
    def config(self) -> Any:  # type: ignore[override]
        return gguf_config(self.metadata, tied="output.weight" not in self._stored, where=self.location)

    @property
    def architecture(self) -> str:
        return causal_class(self.config, self.location).__name__

    @property
    def generation_config(self) -> dict[str, Any]:
        return special_ids(self.config)

    def read(self, name: str) -> torch.Tensor:
        import gguf

        if name not in self._stored:
            raise ModelError(f"{self.location}: no tensor {name!r} in the file")
        stored = self._stored[name]
        values = gguf.dequantize(stored.data, stored.kind).reshape(stored.shape)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def content_sample(self, name: str) -> bytes:
        """The stored (quantized) bytes at three places; dequantizing everything would take seconds."""
        flat = self._stored[name].data.reshape(-1).view("uint8")
        middle = flat.size // 2
        return b"".join(part.tobytes() for part in (flat[:4096], flat[middle : middle + 4096], flat[-4096:]))

    def build(self, dtype: torch.dtype) -> torch.nn.Module:
        return build_from_config(causal_class(self.config, self.location), self.config, dtype)

    def recipes(self, model: torch.nn.Module) -> dict[str, Recipe]:
        return gguf_recipes(self.gguf_architecture, model.state_dict(), model.config, self.tensors)

    def write_tokenizer(self, folder: Path) -> list[str]:
        from transformers import PreTrainedTokenizerFast

        if "tokenizer.ggml.tokens" not in self.metadata:
            return []
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                self.file.parent, gguf_file=self.file.name, local_files_only=True
            )
        except (ValueError, KeyError, OSError, NotImplementedError) as error:
            raise ModelError(f"{self.location}: its tokenizer cannot be converted: {error}") from error
        return save_tokenizer(tokenizer, folder, self.generation_config)

    @property
    def quantization(self) -> dict[str, int]:
        """How many tensors of each stored type the file holds, for reports."""
        counts: dict[str, int] = {}
        for stored in self._stored.values():
            counts[stored.kind.name] = counts.get(stored.kind.name, 0) + 1
        return counts

    def _refuse_scaled_rope(self) -> None:
        kind = self.metadata.get(f"{self.gguf_architecture}.rope.scaling.type")
        has_factors = any(name.startswith("rope_f") for name in self._stored)
        if kind not in (None, "none") or has_factors:
            raise ModelError(
                f"{self.location}: scaled rotary embeddings ({kind or 'rope_freqs'}) of GGUF files are not read; "
                "use the model's Hugging Face folder"
            )
