"""Tool calls and reasoning over HTTP: what clients get from a model's text, whole and streamed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import RunningServer
from treadle.ir.errors import ConfigError
from treadle.runtime.renderer import Renderer
from treadle.server.config import ServerConfig

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
USER = [{"role": "user", "content": "What is the weather?"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<tool_call>{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0)


def streamed(chunks: Any) -> tuple[dict[str, Any], list[tuple[str, str, str]], str | None]:
    """Text by field, calls as (id, name, arguments) and the finish reason of a stream."""
    texts: dict[str, Any] = {}
    calls: list[list[str]] = []
    reason = None
    for chunk in chunks:
        (choice,) = chunk.choices
        delta = choice.delta.model_dump()
        for field in ("content", "reasoning_content", "reasoning"):
            if delta.get(field):
                texts[field] = texts.get(field, "") + delta[field]
        for call in choice.delta.tool_calls or ():
            assert call.index in (len(calls), len(calls) - 1)
            if call.index == len(calls):
                calls.append([call.id or "", call.function.name, ""])
            calls[call.index][2] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return texts, [(a, b, c) for a, b, c in calls], reason


def ask(server: RunningServer, **options: Any) -> Any:
    return client(server).chat.completions.create(model="fake", messages=USER, **{"tools": TOOLS, **options})  # type: ignore[call-overload]


def test_calls_of_a_model(answering: Any) -> None:
    """Text and calls apart; whole and streamed say the same; each call has an id of its own."""
    server = answering(CALLS)
    (choice,) = ask(server).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("weather", {"city": "Zürich"}), ("now", {})]
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)
    texts, parts, reason = streamed(ask(server, stream=True))
    assert texts == {"content": "Let me see."} and reason == "tool_calls"
    assert [(name, arguments) for _, name, arguments in parts] == [(call.function.name, call.function.arguments) for call in calls]


def test_a_round_trip(answering: Any) -> None:
    """The calls of an answer and their results go back to the model as it writes and reads them."""
    server = answering(CALLS)
    message = ask(server).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in message.tool_calls]
    history = [*USER, message.model_dump(exclude_none=True), *results]
    client(server).chat.completions.create(model="fake", messages=history, tools=TOOLS)  # type: ignore[call-overload]
    prompt = server.engine.renderer.decode(server.engine.seen[-1][0])
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>' in prompt
    assert prompt.count("<tool_response>\n12 degrees\n</tool_response>") == 2 and "None" not in prompt


def test_one_call_at_a_time(answering: Any) -> None:
    """parallel_tool_calls: false drops every call but the first, whole and streamed."""
    server = answering(CALLS)
    assert [call.function.name for call in ask(server, parallel_tool_calls=False).choices[0].message.tool_calls] == ["weather"]
    assert [name for _, name, _ in streamed(ask(server, parallel_tool_calls=False, stream=True))[1]] == ["weather"]


def test_text_only(answering: Any) -> None:
    """Without a call, or without tools to call, the text is the model's own."""
    server = answering("  No tool helps here. \n")
    (choice,) = ask(server).choices
    assert choice.message.content == "  No tool helps here. \n" and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    for options in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        server = answering(CALLS)
        assert ask(server, **options).choices[0].message.content == CALLS


def test_a_forced_function(answering: Any) -> None:
    """tool_choice with a name: the answer is held to the arguments' schema and comes as one call; the reason is "stop"."""
    server = answering('{"city": "Oslo"}')
    choice_of = {"type": "function", "function": {"name": "weather"}}
    (choice,) = ask(server, tool_choice=choice_of).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    assert choice.finish_reason == "stop" and choice.message.content is None
    constraint = server.engine.seen[-1][1].structured_outputs.constraint
    assert json.loads(constraint.source) == WEATHER["function"]["parameters"]
    texts, parts, _ = streamed(ask(server, tool_choice=choice_of, stream=True))
    assert texts == {} and [part[1:] for part in parts] == [("weather", '{"city": "Oslo"}')]


def test_a_required_call(answering: Any) -> None:
    """tool_choice "required": the answer is held to be a list of calls."""
    server = answering('[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "now", "parameters": {}}]')
    for stream in (False, True):
        found = ask(server, tool_choice="required", stream=stream)
        if stream:
            _, parts, reason = streamed(found)
            names = [name for _, name, _ in parts]
        else:
            names, reason = [call.function.name for call in found.choices[0].message.tool_calls], found.choices[0].finish_reason
        assert names == ["weather", "now"] and reason == "tool_calls"
    assert json.loads(server.engine.seen[-1][1].structured_outputs.json)["type"] == "array"
    ask(server, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(server.engine.seen[-1][1].structured_outputs.json)["maxItems"] == 1


def test_allowed_tools(answering: Any) -> None:
    """Only the tools that are allowed are shown and held to."""
    server = answering('[{"name": "now", "parameters": {}}]')
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}}
    assert ask(server, tool_choice=allowed).choices[0].message.tool_calls[0].function.name == "now"
    ids, params = server.engine.seen[-1]
    assert "weather" not in params.structured_outputs.json and '"weather"' not in server.engine.renderer.decode(ids)


def test_strict_tools_and_formats(answering: Any) -> None:
    """Strict tools hold calls within text to their schemas; with a response format the answer is either of the two."""
    server = answering("ok")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    ask(server, tools=[strict, NOW])
    (form,) = [json.loads(server.engine.seen[-1][1].structured_outputs.structural_tag)["format"]]
    assert form["type"] == "triggered_tags" and form["triggers"] == ["<tool_call>"]
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [WEATHER["function"]["parameters"], {"type": "object"}]
    ask(server, response_format={"type": "json_object"})
    form = json.loads(server.engine.seen[-1][1].structured_outputs.structural_tag)["format"]
    assert [element["type"] for element in form["elements"]] == ["json_schema", "tags_with_separator"]
    ask(server, response_format={"type": "json_object"}, tool_choice="none")
    assert server.engine.seen[-1][1].structured_outputs.json_object


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "always"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "sing"}}}, "tool_choice", "weather, now"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "one of"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "at least one tool"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "constrained otherwise"),
        ({"tools": [{"type": "browser"}]}, "tools", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": ""}}]}, "tools", "tools[1].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "JSON schema"),
    ],
)
def test_refusals_name_the_field(answering: Any, fields: dict[str, Any], param: str, words: str) -> None:
    """A tool choice that cannot be honoured is a 400 that names the field and the choices."""
    body = {"messages": USER, "tools": TOOLS, **fields}
    response = httpx.post(f"{answering('x').base_url}/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and words in error["message"], error


def test_reasoning_apart_from_content(answering: Any) -> None:
    """C06-15: reasoning that the prompt opens comes in fields of its own, before content and calls, whole and streamed."""
    server = answering(f"Let me think.\n</think>\n\n{CALLS}", template=THINKING)
    (choice,) = ask(server).choices
    message = choice.message.model_dump()
    assert message["reasoning_content"] == message["reasoning"] == "Let me think."
    assert message["content"] == "Let me see." and len(message["tool_calls"]) == 2
    texts, parts, reason = streamed(ask(server, stream=True))
    assert texts == {"reasoning_content": "Let me think.", "reasoning": "Let me think.", "content": "Let me see."}
    assert len(parts) == 2 and reason == "tool_calls"
    hidden = ask(server, extra_body={"include_reasoning": False}).choices[0].message.model_dump()
    assert "reasoning" not in hidden and hidden["content"] == "Let me see."
    off = answering("a</think>b", template=THINKING, config={"reasoning_parser": "none"})
    assert ask(off).choices[0].message.content == "a</think>b"


def test_marks_that_are_special_tokens(answering: Any) -> None:
    """Marks that are special tokens stay in the text for the parser, and only then."""
    server = answering('<|im_start|>{"name": "now", "parameters": {}}', config={"tool_call_parser": "llama3_json"})
    ask(server)
    assert server.engine.seen[-1][1].skip_special_tokens is True  # <|python_tag|> is no token of this model
    server.state.renderer.__dict__["special_marks"] = frozenset({"<|python_tag|>"})
    ask(server)
    assert server.engine.seen[-1][1].skip_special_tokens is False
    ask(server, tool_choice="none")
    assert server.engine.seen[-1][1].skip_special_tokens is True


def test_logprobs_of_what_a_parser_holds_back(answering: Any) -> None:
    """Each token's logprobs come, also while the text of it is held back."""
    server = answering(CALLS)
    found = [chunk.choices[0].logprobs for chunk in ask(server, stream=True, logprobs=True)]
    assert sum(len(logprobs.content) for logprobs in found if logprobs) == len(server.engine.script)


def test_an_unknown_parser_is_an_error_of_the_start() -> None:
    """Names that do not exist stop the server before anything is loaded."""
    with pytest.raises(ConfigError, match=r"unknown tool-call parser 'hermess'"):
        ServerConfig(tool_call_parser="hermess")


def test_special_marks(tmp_path: Any) -> None:
    from tests.server.tiny_tokenizer import SPECIAL, write_tokenizer

    assert Renderer.load(write_tokenizer(tmp_path)).special_marks == set(SPECIAL)
