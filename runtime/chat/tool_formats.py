"""Tool-call formats: `TOOL_FORMATS`, what tells from a chat template which one its model writes. A new one is one file in
`formats/`, one row here and its signs, or a plugin's entry point in group `treadle.tool_parsers`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from treadle.ir.registry import Registry
from treadle.runtime.chat.reader import Pieces, Text, Tools

AUTO, NONE = "auto", "none"


def random_call_id() -> str:
    """An id as OpenAI's servers give to calls."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls.

    `parse(text, tools)` is the generator that reads them. `marks` must reach it, so they are kept in the text even where
    they are special tokens. `tag` is (begin, end, trigger) for `tagged_tools`, where calls can be held to their schemas.
    """

    parse: Callable[[Text, Tools], Pieces[None]]
    marks: tuple[str, ...] = ()
    tag: tuple[str, str, str] | None = None
    call_id: Callable[[], str] = random_call_id


TOOL_FORMATS = Registry(
    "tool-call parser",
    {
        name: f"treadle.runtime.chat.formats.{name}:FORMAT"
        for name in ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3")
    },
    group="treadle.tool_parsers",
)

_SIGNS = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>",),
    "mistral": ("[TOOL_CALLS]",),
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "hermes": ("<tool_call>",),
    "pythonic": ("[func_name1(",),
    "llama3_json": ("<|start_header_id|>", '"parameters"'),
}
"""What stands in the chat templates of models that write a format: all of it, and of no row before."""


def tool_format(asked: str, template: str | None) -> ToolFormat | None:
    """The format of that name; for "auto" the one that `template` shows, None where it shows none of ours.

    None for "none". Raises ConfigError that lists the names for an unknown one.
    """
    if asked == NONE:
        return None
    if asked == AUTO:
        name = next((name for name, signs in _SIGNS.items() if all(sign in (template or "") for sign in signs)), None)
        return TOOL_FORMATS.get(name) if name else None
    return TOOL_FORMATS.get(asked)
