"""The renderer of a bundle, from its verified tokenizer files. Imports no torch."""

from __future__ import annotations

from treadle.codegen.bundle import Bundle
from treadle.runtime.renderer import Renderer

TOKENIZER_FILE = "tokenizer.json"


def renderer_of(bundle: Bundle) -> Renderer | None:
    """Reads the bundle's tokenizer folder once every file of it is verified; None if the bundle has no tokenizer."""
    files = bundle.manifest.tokenizer
    folders = [path.rpartition("/")[0] for path in files if path.rpartition("/")[2] == TOKENIZER_FILE]
    if not folders:
        return None
    bundle.verify(files)
    inside = [path.removeprefix(folders[0] + "/") for path in files]
    return Renderer.load(bundle.root / folders[0], only=inside, eos_token_ids=_configured_eos(bundle))


def _configured_eos(bundle: Bundle) -> list[int] | None:
    """The model configuration's ids where no generation_config.json overrides them; else None, and the folder decides."""
    if any(path.endswith("/generation_config.json") for path in bundle.manifest.tokenizer):
        return None
    eos = bundle.manifest.model.config.get("eos_token_id")
    if eos is None:
        return None
    return [eos] if isinstance(eos, int) else list(eos)
