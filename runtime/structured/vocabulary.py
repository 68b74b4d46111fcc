"""The model's tokens as grammar backends want them: bytes of each id, special ids, ids that end an answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.ir.errors import UserError
from treadle.runtime.chat.reasoning import OpenReasoning, reasoning_format
from treadle.runtime.renderer import Renderer
from treadle.runtime.structured.reasoner import Reasoner


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` are the bytes of id i, as wide as the model's logits.

    `reasoner` says where a reasoning model's answer begins. Bytes are empty for ids without text: special tokens, which are no text to a reader either, and padding.
    """

    tokens: list[bytes]
    eos_token_ids: list[int]
    special_token_ids: list[int]
    tokenizer_json: str = field(repr=False)
    reasoner: Reasoner | None = None

    @property
    def num_words(self) -> int:
        """Words of one row of a mask."""
        return (len(self.tokens) + 31) // 32

    @classmethod
    def of(cls, renderer: Renderer | None, vocab_size: int, reasoning_parser: str = "none") -> Vocabulary:
        """Reads the tokenizer of a model with logits of `vocab_size`. Raises UserError if answers could not be ended."""
        if renderer is None:
            raise UserError("this model has no tokenizer, and structured output is made of text; drop structured_outputs")
        eos = [token for token in renderer.eos_token_ids if 0 <= token < vocab_size]
        if not eos:
            raise UserError("this model has no end-of-sequence token, which ends a structured output; drop structured_outputs")
        added = renderer.tokenizer.get_added_tokens_decoder()
        special = sorted({token for token, content in added.items() if content.special and token < vocab_size} | set(eos))
        tokens = [renderer.token_text.bytes_of(token) for token in range(vocab_size)]
        for token in special:
            tokens[token] = b""
        form = reasoning_format(reasoning_parser, renderer.template_source)
        reasoner = OpenReasoning.of(form, renderer.tokenizer.token_to_id)
        return cls(tokens, eos, special, renderer.tokenizer.to_str(), reasoner)
