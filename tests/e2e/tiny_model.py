"""A small Llama with a real tokenizer and chat template, as a Hugging Face folder, for tests that change the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.models import save_model
from tests.server.tiny_tokenizer import write_tokenizer

VOCABULARY = 400


def save_tiny(folder: Path, generation_config: dict[str, Any] | None = None, **changes: Any) -> torch.nn.Module:
    """Writes the model and returns it; `changes` are of its configuration. No generation_config.json unless given."""
    model = save_model("llama", folder, vocab_size=VOCABULARY, **changes)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder, generation_config=generation_config)
    return model


def edit_json(file: Path, **changes: Any) -> None:
    """Sets top-level fields of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
