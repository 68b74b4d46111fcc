"""A model's chat template: compiled in a sandbox with what Hugging Face templates rely on, probed for what it shows.

Templates come with a model and are not trusted: they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.ir.errors import ModelError
from treadle.runtime.chat.messages import ChatError, ContentFormat, normalise_messages
from treadle.runtime.chat.tools_as_text import with_tools

RESERVED_NAMES = ("messages", "tools", "add_generation_prompt")
"""What a template is always given; keyword arguments of a request may not replace them."""

_PROBE = "treadle-probe-7f3a"
"""A text no template contains: shows where, and whether, a content appears in the prompt."""

_RENDER_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template can raise for messages it was not written for; each is the caller's to fix."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote; in a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusal(jinja2.TemplateError):
    """Raised by a template itself, through `raise_exception`."""


class ChatTemplate:
    """One template. `content_format`, `shows_tools` and `shows_tool_calls` say what it can render."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """Compiles `source`; raises ModelError with the line for one that is not valid jinja."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            self._ast = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names the template reads from its context."""
        return frozenset(jinja2.meta.find_undeclared_variables(self._ast))

    @property
    def shows_tools(self) -> bool:
        """Whether a list of tools can appear in the prompt."""
        return "tools" in self.variables

    @cached_property
    def shows_tool_calls(self) -> bool:
        """Whether the calls an assistant made earlier can appear in the prompt."""
        attributes = {node.attr for node in self._ast.find_all(jinja2.nodes.Getattr)}
        constants = {node.value for node in self._ast.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        return "tool_calls" in attributes | constants

    @cached_property
    def shows_system(self) -> bool:
        """Whether a system message appears in the prompt; some templates refuse or drop it."""
        probe = [{"type": "text", "text": _PROBE}] if self.content_format == "openai" else _PROBE
        return self._shows([{"role": "system", "content": probe}, {"role": "user", "content": probe}], times=2)

    @cached_property
    def content_format(self) -> ContentFormat:
        """Found by rendering one message both ways; "string" if neither renders (the real messages will tell why)."""
        if not self._renders([{"type": "text", "text": _PROBE}]):
            return "string"
        return "both" if self._renders(_PROBE) else "openai"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt's text; with `continue_final_message` it ends inside the last message.

        Tools that the template cannot show are described in the system message. Raises ChatError for messages that
        the template cannot show.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                "continue_final_message",
            )
        for name in set(kwargs or ()) & set(RESERVED_NAMES):
            raise ChatError(f"chat_template_kwargs may not set {name!r}; it has its own field", "chat_template_kwargs")
        conversation = normalise_messages(messages, self.content_format, shows_tool_calls=self.shows_tool_calls)
        for message in conversation:
            if message["role"] == "developer" and "developer" not in self.source:
                message["role"] = "system"  # its newer name, which few templates know
        if tools and not self.shows_tools:
            conversation = with_tools(conversation, tools, role="system" if self.shows_system else "user")
            tools = None
        if continue_final_message:
            _mark_end(conversation[-1])
        text = self._render(conversation, tools, add_generation_prompt, kwargs or {})
        return _cut_at_mark(text) if continue_final_message else text

    def _render(
        self, conversation: list[dict[str, Any]], tools: Any, add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        context = {"documents": None, **self.special_tokens, **kwargs}
        context |= {"messages": conversation, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except TemplateRefusal as error:
            raise ChatError(f"the model's chat template refuses these messages: {error}") from error
        except _RENDER_FAILURES as error:
            what = f"{type(error).__name__}: {error}"
            raise ChatError(f"the model's chat template cannot render these messages: {what}") from error

    def _renders(self, content: Any) -> bool:
        """Whether a user message of this content shows the probe, and not a Python list's spelling of it."""
        return self._shows([{"role": "user", "content": content}])

    def _shows(self, conversation: list[dict[str, Any]], times: int = 1) -> bool:
        try:
            text = self._render(conversation, None, True, {})
        except ChatError:
            return False
        return text.count(_PROBE) >= times and "'type'" not in text and '"type"' not in text


def _mark_end(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _PROBE
    elif content:
        content[-1]["text"] += _PROBE


def _cut_at_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_PROBE)
    if not mark:
        raise ChatError("the last message has no text that could be continued", "continue_final_message")
    return before


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Any] = environment.globals
    helpers |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which would put `\\u003c` into prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
