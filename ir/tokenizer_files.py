"""Writes what serving needs of a tokenizer: files that `tokenizers` and `jinja2` alone can use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from treadle.ir.errors import ModelError

_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SLOW = ("vocab.json", "tokenizer.model", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def copy_tokenizer(source: Path, target: Path, generation_config: dict[str, Any]) -> list[str]:
    """Tokenizer files of a Hugging Face folder; converts one that has no tokenizer.json. Returns the names."""
    if not (source / "tokenizer.json").is_file():
        if not any((source / name).is_file() for name in _SLOW):
            return []
        return save_tokenizer(_load(source), target, generation_config)
    target.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    _write_chat_template(source, target)
    return _complete(target, generation_config)


def save_tokenizer(tokenizer: Any, target: Path, generation_config: dict[str, Any]) -> list[str]:
    """The files of a transformers tokenizer that has a fast backend. Returns the names."""
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(target)
    if not (target / "tokenizer.json").is_file():
        raise ModelError(f"the tokenizer {type(tokenizer).__name__} cannot be written as tokenizer.json")
    _write_chat_template(target, target)
    return _complete(target, generation_config)


def _load(source: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (ValueError, OSError, ImportError) as error:
        raise ModelError(f"{source}: the tokenizer cannot be converted to tokenizer.json: {error}") from error


def _write_chat_template(source: Path, target: Path) -> None:
    """chat_template.jinja from wherever the folder keeps its template."""
    named = source / "chat_template.jinja"
    if named.is_file():
        if source != target:
            shutil.copyfile(named, target / named.name)
        return
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = source / name
        template = json.loads(file.read_text()).get("chat_template") if file.is_file() else None
        if isinstance(template, list):
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
        if isinstance(template, str):
            (target / "chat_template.jinja").write_text(template)
            return


def _complete(target: Path, generation_config: dict[str, Any]) -> list[str]:
    """Adds special_tokens_map.json and generation_config.json where they are missing."""
    config_file = target / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    if not config_file.is_file():
        config_file.write_text("{}\n")
    specials = target / "special_tokens_map.json"
    if not specials.is_file():
        found = {name: config[name] for name in _SPECIAL if config.get(name) is not None}
        specials.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    (target / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n")
    return sorted(file.name for file in target.iterdir() if file.is_file())
