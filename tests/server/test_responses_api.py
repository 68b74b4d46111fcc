"""/v1/responses over HTTP with OpenAI's client: items, events, earlier answers, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import RunningServer
from tests.server.test_tools import CALLS, THINKING, WEATHER
from treadle.server.response_store import ResponseStore, StoredResponse

TOOL = {"type": "function", **WEATHER["function"]}
NOW = {"type": "function", "name": "now", "parameters": None, "strict": False}


def ask(server: RunningServer, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0)
    return client.responses.create(**{"model": "fake", "input": "Hello?", **fields})  # type: ignore[call-overload]


def prompt_of(server: RunningServer, index: int = -1) -> str:
    return server.engine.renderer.decode(server.engine.seen[index][0])


def test_text(answering: Any) -> None:
    """An answer of text: one message, usage, what was asked for repeated."""
    server = answering("A fox, of course.")
    response = ask(server, instructions="Be brief.", temperature=0.5, metadata={"k": "v"})
    assert response.output_text == "A fox, of course." and response.status == "completed"
    assert response.usage.output_tokens == len(server.engine.script) and response.usage.input_tokens > 0
    assert (response.temperature, response.metadata, response.instructions) == (0.5, {"k": "v"}, "Be brief.")
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>" in prompt_of(server)


def test_it_answers_as_a_chat_does(answering: Any) -> None:
    """The same conversation has the same prompt, whichever way it comes."""
    server = answering("ok")
    ask(server, input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}])
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    httpx.post(f"{server.base_url}/v1/chat/completions", json={"messages": chat})
    assert server.engine.seen[0][0] == server.engine.seen[1][0]


def test_items_and_events_agree(answering: Any) -> None:
    """Reasoning, text and calls as items; the events build the same items, numbered without gaps, deltas joined."""
    server = answering(f"Let me think.</think>{CALLS}", template=THINKING)
    whole = ask(server, tools=[TOOL, NOW])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "Let me think." and whole.output_text == "Let me see."
    assert json.loads(whole.output[2].arguments) == {"city": "Zürich"} and whole.output[2].name == "weather"
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events = list(ask(server, tools=[TOOL, NOW], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    final = events[-1].response
    assert len({item.id for item in final.output}) == 4 and final.id == events[0].response.id
    strip = lambda item: {key: value for key, value in item.model_dump().items() if key not in ("id", "call_id")}  # noqa: E731
    assert [strip(item) for item in final.output] == [strip(item) for item in whole.output]
    joined: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            joined[event.output_index] = joined.get(event.output_index, "") + event.delta
    texts = [item.arguments if item.type == "function_call" else item.content[0].text for item in final.output]
    assert [joined[index] for index in range(4)] == texts
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2, 3] and all(event.item.status == "in_progress" for event in added)


def test_the_client_can_follow_a_stream(answering: Any) -> None:
    """OpenAI's own accumulator takes the events."""
    server = answering(CALLS)
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0)
    with client.responses.stream(model="fake", input="Hello?", tools=[TOOL, NOW]) as stream:  # type: ignore[list-item]
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "Let me see." and len(final.output) == 3


def test_a_conversation_by_id(answering: Any) -> None:
    """previous_response_id goes on after the answer's own items, without its instructions; calls get their results."""
    server = answering(CALLS)
    first = ask(server, tools=[TOOL, NOW], instructions="Be brief.")
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "12 degrees"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = ask(server, previous_response_id=first.id, input=results, tools=[TOOL, NOW])
    prompt = prompt_of(server)
    assert "Be brief." not in prompt and "Hello?" in prompt and "Let me see." in prompt
    assert prompt.count("<tool_response>\n12 degrees\n</tool_response>") == 2
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>' in prompt
    ask(server, previous_response_id=second.id, input="And now?")
    assert prompt_of(server).count("12 degrees") == 2 and "And now?" in prompt_of(server)
    same = [{"role": "user", "content": "Hello?"}, *[item.model_dump() for item in first.output], *results]
    ask(server, input=same, tools=[TOOL, NOW])
    assert server.engine.seen[-1][0] == server.engine.seen[1][0], "items sent again are the conversation that was kept"


def test_stored_answers(answering: Any) -> None:
    """They can be read and forgotten; store: false keeps none; the oldest go."""
    server = answering("ok", config={"max_stored_responses": 2})
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0)
    first = ask(server)
    assert client.responses.retrieve(first.id).output_text == "ok"
    assert [item.role for item in client.responses.input_items.list(first.id)] == ["user"]
    unkept = ask(server, store=False)
    with pytest.raises(openai.NotFoundError, match="not any more"):
        client.responses.retrieve(unkept.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        ask(server, previous_response_id=first.id)
    ids = [ask(server).id for _ in range(3)]
    assert [httpx.get(f"{server.base_url}/v1/responses/{name}").status_code for name in ids] == [404, 200, 200]


def test_the_store_is_bounded() -> None:
    """By number and by bytes; what is used stays longest."""
    store = ResponseStore(3, 1000)
    for name in "abc":
        store.add(StoredResponse({"id": name, "text": "x" * 100}, [], []))
    assert store.get("a") is not None
    store.add(StoredResponse({"id": "d", "text": "x" * 100}, [], []))
    assert store.get("b") is None and store.get("a") is not None and len(store) == 3
    store.add(StoredResponse({"id": "e", "text": "x" * 800}, [], []))
    assert len(store) <= 2 and store.get("e") is not None
    store.add(StoredResponse({"id": "f", "text": "x" * 8000}, [], []))
    assert len(store) == 0
    assert not store.remove("f")


def test_a_limit_makes_it_incomplete(answering: Any) -> None:
    """max_output_tokens ends an answer early, which it says, whole and streamed."""
    server = answering("the quick brown fox jumps over the lazy dog")
    response = ask(server, max_output_tokens=3)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    events = list(ask(server, max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == response.output_text


def test_formats_and_choices_constrain(answering: Any) -> None:
    """text.format and tool_choice in their flat forms are those of a chat."""
    server = answering('{"city": "Oslo"}')
    schema = WEATHER["function"]["parameters"]
    ask(server, text={"format": {"type": "json_schema", "name": "w", "schema": schema, "strict": True}})
    assert json.loads(server.engine.seen[-1][1].structured_outputs.json) == schema
    response = ask(server, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert [(item.type, item.name, item.arguments) for item in response.output] == [("function_call", "weather", '{"city": "Oslo"}')]


def test_an_engine_that_dies_fails_the_response(answering: Any) -> None:
    """A stream that has begun ends with response.failed, not with silence."""
    server = answering("the quick brown fox jumps over the lazy dog", delay=0.05)
    events = []
    for event in ask(server, stream=True):
        events.append(event)
        if len(events) == 4:
            server.engine.crash()
    assert events[-1].type == "response.failed" and "died" in events[-1].response.error.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "at least one item"),
        ({"input": 3}, "input", "text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0].type"),
        ({"input": ["x"]}, "input", "input[0]"),
        ({"background": True}, "background", "not supported"),
        ({"n": 2}, "n", "one response"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"include": ["file_search_call.results"]}, "include", "not supported"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "not any more"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tool_choice": "required"}, "tool_choice", "at least one tool"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_k": "many"}, "top_k", "integer"),
        ({"text": {"format": {"type": "yaml"}}}, "text", "yaml"),
    ],
)
def test_refusals_name_the_field(answering: Any, fields: dict[str, Any], param: str, words: str) -> None:
    """What cannot be honoured is a 400 with the field and what to do."""
    response = httpx.post(f"{answering('x').base_url}/v1/responses", json={"input": "x", **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and words in error["message"], error


def test_encrypted_reasoning_may_be_included(answering: Any) -> None:
    """Clients of reasoning models always send it; reasoning here is open."""
    assert ask(answering("x"), include=["reasoning.encrypted_content"]).status == "completed"

