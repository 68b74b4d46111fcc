"""Reasoning formats: `REASONING_FORMATS`, the marks between which a model thinks before it answers. A new one is a row
here, or a plugin's entry point in group `treadle.reasoning_parsers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle.ir.registry import Registry
from treadle.runtime.chat.reader import Pieces, Reasoning, Text, starts_with, until

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """The marks around reasoning. `implicit`: the model leaves the first one out, every answer starts with reasoning."""

    start: str
    end: str
    implicit: bool = False

    def opened(self, prompt: str) -> bool:
        """Whether the reasoning is open where a prompt ends, so that the answer goes on within it."""
        return prompt.rstrip().endswith(self.start)

    def parse(self, text: Text, opened: bool) -> Pieces[None]:
        """Yields the reasoning, if the answer begins with one, and takes its marks."""
        marked = yield from starts_with(text, self.start)
        if marked or opened or self.implicit:
            yield from until(text, self.end, kind=Reasoning)


THINK = ReasoningFormat(start="<think>", end="</think>")
DEEPSEEK_R1 = ReasoningFormat(start="<think>", end="</think>", implicit=True)
MISTRAL = ReasoningFormat(start="[THINK]", end="[/THINK]")
SEED_OSS = ReasoningFormat(start="<seed:think>", end="</seed:think>")
KIMI = ReasoningFormat(start="◁think▷", end="◁/think▷")

REASONING_FORMATS = Registry(
    "reasoning parser",
    {
        "qwen3": f"{__name__}:THINK",
        "deepseek_r1": f"{__name__}:DEEPSEEK_R1",
        "mistral": f"{__name__}:MISTRAL",
        "seed_oss": f"{__name__}:SEED_OSS",
        "kimi": f"{__name__}:KIMI",
    },
    group="treadle.reasoning_parsers",
)

_BY_TEMPLATE = ("qwen3", "mistral", "seed_oss", "kimi")
"""What "auto" looks for, by the mark that ends a section; whether one is open the prompt itself says."""


def reasoning_format(asked: str, template: str | None) -> ReasoningFormat | None:
    """The format of that name; for "auto" the one whose end mark is in `template`, None where none is.

    None for "none". Raises ConfigError that lists the names for an unknown one.
    """
    if asked == NONE:
        return None
    if asked == AUTO:
        found = (REASONING_FORMATS.get(name) for name in _BY_TEMPLATE)
        return next((form for form in found if form.end in (template or "")), None)
    return REASONING_FORMATS.get(asked)


class OpenReasoning:
    """Says to structured output where reasoning ends (a `LocatingReasoner`), by the ids of the marks.

    Only an answer that begins within a section has reasoning: where a model may choose to reason, a constraint holds
    from its first token, so that the answer is what was asked for in any case.
    """

    TAIL = 4
    """Tokens from the prompt's end in which the start mark counts as open: templates add a line end at most."""

    def __init__(self, start: int, end: int, *, implicit: bool = False):
        self._start, self._end, self._implicit = start, end, implicit

    @classmethod
    def of(cls, form: ReasoningFormat | None, token_to_id: Callable[[str], int | None]) -> OpenReasoning | None:
        """For a format whose marks are tokens; None for others, whose marks depend on what stands around them."""
        if form is None:
            return None
        start, end = token_to_id(form.start), token_to_id(form.end)
        return None if start is None or end is None else cls(start, end, implicit=form.implicit)

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Whether the answer to a prompt begins within reasoning."""
        for token in reversed(prompt[-self.TAIL :]):
            if token in (self._start, self._end):
                return token == self._start
        return self._implicit

    def end_offset(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens up to and with the end mark after the last start mark; None while there is none."""
        end = None
        for place in range(len(token_ids) - 1, -1, -1):
            if token_ids[place] == self._start:
                return end
            if token_ids[place] == self._end:
                end = place + 1
        return end

    def reasoning_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing of `token_ids` is in an open section."""
        return self.end_offset(token_ids) is not None
