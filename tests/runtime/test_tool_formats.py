"""Tool calls in the forms models write them: what is a call, what is text, and that streaming changes nothing."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.ir.errors import ConfigError
from treadle.runtime.chat.json_calls import read_calls
from treadle.runtime.chat.reader import (
    Arguments,
    CallStart,
    Content,
    Piece,
    Reader,
    Reasoning,
    everything,
    first_call_only,
    trimmed,
)
from treadle.runtime.chat.reasoning import REASONING_FORMATS, OpenReasoning, reasoning_format
from treadle.runtime.chat.tool_formats import TOOL_FORMATS, tool_format

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}},
    "now": {},
}
OSLO = {"city": "Oslo {] \"quoted\" \\ é", "days": 2}


def read(parse: Any, text: str, cuts: list[int] | None = None) -> list[Piece]:
    """The pieces of a text that comes in parts, equal neighbours joined."""
    reader = Reader(lambda source: trimmed(parse(source)))
    found: list[Piece] = []
    bounds = [0, *sorted(cuts or []), len(text)]
    for start, end in pairwise(bounds):
        found += reader.feed(text[start:end])
    joined: list[Any] = []
    for piece in found + reader.finish():
        if joined and type(joined[-1]) is type(piece) and not isinstance(piece, CallStart):
            joined[-1] = type(piece)(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def summary(pieces: list[Piece]) -> list[Any]:
    """Calls as (name, arguments), text as it is."""
    found: list[Any] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            found.append((piece.name, None))
        elif isinstance(piece, Arguments):
            found[-1] = (found[-1][0], json.loads(piece.text))
        else:
            found.append(piece.text)
    return found


def json_call(arguments: Any = OSLO, name: str = "weather", key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"

CASES = [
    # one call, text around it
    ("hermes", f"Let me see.\n\n<tool_call>\n{json_call()}\n</tool_call>\n", ["Let me see.", ("weather", OSLO)]),
    ("hermes", f"<tool_call>{json_call()}</tool_call>\n<tool_call>{json_call({}, 'now')}</tool_call>", [("weather", OSLO), ("now", {})]),
    # arguments first, none, as text, in OpenAI's own shape, a list of calls
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', [("now", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> done', [("now", {}), "done"]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [("now", {"a": 1})]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {"a": 1}}}</tool_call>', [("now", {"a": 1})]),
    ("hermes", f"<tool_call>[{json_call()}, {json_call({}, 'now')}]</tool_call>", [("weather", OSLO), ("now", {})]),
    # a brace too many, no end mark, no call at all
    ("hermes", '<tool_call>{"name": "now"}}</tool_call>', [("now", {})]),
    ("hermes", f"<tool_call>{json_call()}", [("weather", OSLO)]),
    ("hermes", "<tool_call>nothing</tool_call> x", ["<tool_call>nothing</tool_call> x"]),
    ("hermes", 'a <tool_call>{"city": 1}', ['a <tool_call>{"city": 1}']),
    ("hermes", "1 < 2 and <tool", ["1 < 2 and <tool"]),
    ("llama3_json", json_call(key="parameters"), [("weather", OSLO)]),
    ("llama3_json", f"{json_call(key='parameters')}; {json_call({}, 'now')}", [("weather", OSLO), ("now", {})]),
    ("llama3_json", f"<|python_tag|>{json_call(name='other', key='parameters')}", [("other", OSLO)]),
    ("llama3_json", '{"name": "Bob", "age": 3}', ['{"name": "Bob", "age": 3}']),
    ("llama3_json", json_call(name="Bob"), [json_call(name="Bob")]),
    ("llama3_json", f"It is {json_call()}", [f"It is {json_call()}"]),
    ("mistral", f"Well. [TOOL_CALLS][{json_call()}, {json_call({}, 'now')}]", ["Well.", ("weather", OSLO), ("now", {})]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(OSLO)}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{{}}", [("weather", OSLO), ("now", {})]),
    ("mistral", "[TOOL_CALLS] are marks", ["[TOOL_CALLS] are marks"]),
    (
        "deepseek_v3",
        "Hm. " + DEEPSEEK.format(DEEPSEEK_CALL.format("weather", json.dumps(OSLO)) + "\n" + DEEPSEEK_CALL.format("now", "{}")),
        ["Hm.", ("weather", OSLO), ("now", {})],
    ),
    (
        "deepseek_v3",
        DEEPSEEK.format(f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{json.dumps(OSLO)}<｜tool▁call▁end｜>"),
        [("weather", OSLO)],
    ),
    ("deepseek_v3", DEEPSEEK.format("no call"), [DEEPSEEK.format("no call")]),
    ("pythonic", '[weather(city="Os)lo", days=-2, where={"a": [1, true, None]}), now()]', [("weather", {"city": "Os)lo", "days": -2, "where": {"a": [1, True, None]}}), ("now", {})]),
    ("pythonic", "[1, 2, 3]", ["[1, 2, 3]"]),
    ("pythonic", '[weather(city=open("x"))]', ['[weather(city=open("x"))]']),
    ("pythonic", '[weather("Oslo")]', ['[weather("Oslo")]']),
    ("pythonic", "[other()]", ["[other()]"]),
    ("pythonic", "I use [now()]", ["I use [now()]"]),
    (
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n5\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=where>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>',
        ["Sure.", ("weather", {"city": "Oslo\n5", "days": 3, "where": {"a": [1]}})],
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call> <b>bye</b>", [("now", {}), "<b>bye</b>"]),
    ("qwen3_coder", "<function=weather><parameter=days>soon</parameter></function>", [("weather", {"days": "soon"})]),
    ("qwen3_coder", "<tool_call> is a mark", ["<tool_call> is a mark"]),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_and_text(name: str, text: str, expected: list[Any]) -> None:
    """Each form gives its calls and leaves everything else text, however the answer is cut into parts."""
    parse = tool_format(name, None)
    assert parse is not None
    run = lambda cuts: read(lambda source: parse.parse(source, TOOLS), text, cuts)  # noqa: E731
    whole = run([])
    assert summary(whole) == expected
    assert run(list(range(1, len(text)))) == whole
    chance = random.Random(text)
    for _ in range(20):
        assert run(chance.sample(range(len(text)), k=min(6, len(text)))) == whole


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
@given(st.lists(st.sampled_from([*"ab {}[]\"\\:,<>/=()\n", *(mark for form in TOOL_FORMATS.names() for mark in TOOL_FORMATS.get(form).marks), json_call(), "<function=now>", "<parameter=days>", "now(", '"name"', "[ARGS]"]), max_size=14), st.randoms(use_true_random=False))
def test_any_text(name: str, parts: list[str], chance: random.Random) -> None:
    """No text breaks a parser or depends on how it is cut, and nothing but whitespace of a text without calls is lost."""
    text = "".join(parts)
    form = TOOL_FORMATS.get(name)
    parse = lambda source: form.parse(source, TOOLS)  # noqa: E731
    whole = read(parse, text)
    cuts = chance.sample(range(len(text)), k=min(5, len(text))) if text else []
    assert read(parse, text, cuts) == whole
    if not any(isinstance(piece, CallStart) for piece in whole):
        content = "".join(piece.text for piece in whole if isinstance(piece, Content))
        assert "".join(content.split()) == "".join(text.split())


def test_arguments_come_as_they_are_written() -> None:
    """A call's name is known before its arguments, which are not held back."""
    form = TOOL_FORMATS.get("hermes")
    reader = Reader(lambda source: form.parse(source, TOOLS))
    assert reader.feed('<tool_call>{"name": "weather", "argum') == []
    assert reader.feed('ents": {"ci') == [CallStart("weather"), Arguments('{"ci')]
    assert reader.feed('ty": "Os') == [Arguments('ty": "Os')]
    assert reader.feed('lo"}}</tool') == [Arguments('lo"}')]
    assert reader.feed("_call>") + reader.finish() == []


def test_only_the_first_call() -> None:
    """parallel_tool_calls: false keeps one call."""
    text = f"<tool_call>{json_call()}</tool_call><tool_call>{json_call({}, 'now')}</tool_call>"
    form = TOOL_FORMATS.get("hermes")
    assert summary(read(lambda source: first_call_only(form.parse(source, TOOLS)), text)) == [("weather", OSLO)]


def test_forced_calls() -> None:
    """What `required_tools` makes a model write is read as calls."""
    text = f"[{json_call(key='parameters')}, {json_call({}, 'now', 'parameters')}]"
    assert summary(read(read_calls, text, [3, 9, 40])) == [("weather", OSLO), ("now", {})]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>\n{...}", "hermes"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ('<|start_header_id|> {"name": function name, "parameters": ...}', "llama3_json"),
        ("[func_name1(params_name1=...)]", "pythonic"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_shows_the_form(template: str | None, name: str | None) -> None:
    """`auto` finds the form by what the chat template writes."""
    assert tool_format("auto", template) is (TOOL_FORMATS.get(name) if name else None)
    assert tool_format("none", template) is None


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"unknown tool-call parser 'herms'.*hermes"):
        tool_format("herms", None)
    with pytest.raises(ConfigError, match=r"unknown reasoning parser 'think'.*qwen3"):
        reasoning_format("think", None)


@pytest.mark.parametrize(
    ("name", "opened", "text", "expected"),
    [
        ("qwen3", False, "<think>\nWell, 1 < 2.\n</think>\n\nYes.", [Reasoning("Well, 1 < 2."), Content("Yes.")]),
        ("qwen3", True, "Well.\n</think>\nYes.", [Reasoning("Well."), Content("Yes.")]),
        ("qwen3", True, "<think>Well.</think>Yes.", [Reasoning("Well."), Content("Yes.")]),
        ("qwen3", False, "Yes, <think> is a mark.", [Content("Yes, <think> is a mark.")]),
        ("qwen3", True, "Cut off within </thi", [Reasoning("Cut off within </thi")]),
        ("deepseek_r1", False, "Well.</think>Yes.", [Reasoning("Well."), Content("Yes.")]),
        ("mistral", False, "[THINK]Well.[/THINK]Yes.", [Reasoning("Well."), Content("Yes.")]),
        ("qwen3", True, "</think>\n\nYes.", [Content("\n\nYes.")]),
    ],
)
def test_reasoning(name: str, opened: bool, text: str, expected: list[Piece]) -> None:
    """C06-15: reasoning comes apart from the answer, whole and streamed."""
    form = REASONING_FORMATS.get(name)

    def parse(source: Any) -> Any:
        yield from form.parse(source, opened)
        yield from everything(source)

    assert read(parse, text) == expected
    assert read(parse, text, list(range(1, len(text)))) == expected


def test_where_reasoning_is_open() -> None:
    """C06-15: by the end of the prompt; marks further up are somebody's text."""
    form = REASONING_FORMATS.get("qwen3")
    assert form.opened("<|im_start|>assistant\n<think>\n") and not form.opened("assistant\n<think>\n\n</think>\n\n")
    reasoner = OpenReasoning.of(form, {"<think>": 7, "</think>": 8}.get)
    assert reasoner is not None
    assert reasoner.opened_by([1, 2, 7, 3]) and not reasoner.opened_by([7, 1, 2, 3, 4, 5])
    assert not reasoner.opened_by([7, 3, 8]) and not reasoner.opened_by([])
    assert reasoner.end_offset([1, 7, 3, 4]) is None and not reasoner.reasoning_ended([1, 7, 3, 4])
    assert reasoner.end_offset([1, 7, 3, 8, 5, 8]) == 4
    assert OpenReasoning.of(form, {"<think>": 7}.get) is None
