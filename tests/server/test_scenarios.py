"""Requests any treadle server must answer rightly, whatever model is behind it: each test takes a `base_url`.

Nothing here knows the model; limits and ids are asked from the server itself. Run against a real server by
importing these tests into a module that has its own `base_url` fixture.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from treadle.server.errors import ApiError, as_api_error

USER = [{"role": "user", "content": "Name a colour."}]
GREEN = "seven green bottles"


@pytest.fixture
def http(base_url: str) -> Any:
    with httpx.Client(base_url=base_url, timeout=120, verify=False) as client:
        yield client


@pytest.fixture
def client(base_url: str, http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, http_client=http)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture
def limit(http: httpx.Client) -> int:
    return http.get("/v1/models").json()["data"][0]["max_model_len"]


def reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict_json(response: httpx.Response) -> Any:
    return json.loads(response.text, parse_constant=reject_constant)


def complete(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": GREEN, "max_tokens": 4, "temperature": 0, **body})


def chat(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 4, "temperature": 0, **body})


def refused(response: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    """The response is an error in OpenAI's shape with that status, whose message has the words."""
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]
    if param is not None:
        assert error["param"] == param


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    response = http.post(path, json={**body, "stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line, parse_constant=reject_constant) for line in lines[:-1]]


def test_models(client: openai.OpenAI, model: str, http: httpx.Client) -> None:
    """The official client lists and retrieves the model; another name is a 404."""
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    refused(complete(http, model="nobody"), 404, "nobody", model, param="model")


def test_chat_with_the_official_client(client: openai.OpenAI, model: str) -> None:
    """Streamed and whole answers of a chat are the same text, with usage and logprobs."""
    options: Any = {"model": model, "messages": USER, "max_completion_tokens": 12, "temperature": 0, "seed": 3}
    whole = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in logprobs.content)
    texts = {0: "", 1: ""}
    finish: dict[int, str | None] = {}
    for chunk in client.chat.completions.create(**options, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finish[choice.index] = choice.finish_reason or finish.get(choice.index)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert finish == {choice.index: choice.finish_reason for choice in whole.choices}


def test_completions_with_the_official_client(client: openai.OpenAI, model: str) -> None:
    """Each form of prompt, n, and streams: indexes are prompt times n, texts equal the single ones."""
    options: Any = {"model": model, "max_tokens": 6, "temperature": 0}
    single = [client.completions.create(prompt=text, **options).choices[0].text for text in (GREEN, "a b")]
    batch = client.completions.create(prompt=[GREEN, "a b"], n=2, **options)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in batch.choices] == [single[0], single[0], single[1], single[1]]
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(prompt=[GREEN, "a b"], n=2, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in batch.choices]


def test_token_ids_are_prompts(http: httpx.Client) -> None:
    """C02-01: text and its ids give the same prompt; /tokenize and /detokenize are each other's reverse."""
    found = http.post("/tokenize", json={"prompt": GREEN, "return_token_strs": True}).json()
    ids = found["tokens"]
    assert found["count"] == len(ids) == len(found["token_strs"])
    assert http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True}).json()["prompt"] == GREEN
    texts = {json.dumps(complete(http, prompt=p, echo=True).json()["choices"][0]["text"]) for p in (GREEN, ids, [ids])}
    assert len(texts) == 1
    rendered = http.post("/tokenize", json={"messages": USER}).json()
    assert chat(http).json()["usage"]["prompt_tokens"] == rendered["count"]


def test_a_message_to_be_continued_can_be_counted(http: httpx.Client) -> None:
    """/tokenize ends a chat as /v1/chat/completions would: inside the last message if that goes on."""
    begun = [*USER, {"role": "assistant", "content": "The answer"}]
    open_ended = http.post("/tokenize", json={"messages": begun, "continue_final_message": True}).json()
    assert open_ended["count"] < http.post("/tokenize", json={"messages": begun}).json()["count"]
    answer = chat(http, messages=begun, continue_final_message=True).json()
    assert answer["usage"]["prompt_tokens"] == open_ended["count"]


def test_an_answer_carries_the_callers_request_id(http: httpx.Client) -> None:
    """The id may repeat: it names the answer, not the work."""
    for _ in range(2):
        assert chat(http, request_id="mine").json()["id"] == "chatcmpl-mine"


@pytest.mark.parametrize("tokens", [[-1], [2**31], [10**30], [1.5], [True], [{}], 7, None])
def test_bad_ids_are_refused(http: httpx.Client, tokens: Any) -> None:
    """Ids outside the vocabulary, or no ids, name the field."""
    refused(http.post("/detokenize", json={"tokens": tokens}), 400, "tokens", param="tokens")
    refused(complete(http, prompt=tokens), 400, "prompt", param="prompt")


def test_logprobs_and_echo_are_strict_json(http: httpx.Client) -> None:
    """TRAP-4: the prompt's logprobs are finite, the first is null, and nothing in the answer is NaN or Infinity."""
    body = {"echo": True, "logprobs": 2, "temperature": 1, "top_k": 1, "max_tokens": 3, "ignore_eos": True}
    response = complete(http, **body)
    assert response.status_code == 200
    choice = strict_json(response)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) and value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == strict_json(response)["usage"]["total_tokens"]
    for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, start) or start >= len(choice["text"])
    parts = [event["choices"][0] for event in streamed(http, "/v1/completions", {"prompt": GREEN, **body})]
    assert "".join(part["text"] for part in parts) == choice["text"]
    joined = {key: [x for part in parts for x in (part["logprobs"] or {key: []})[key]] for key in logprobs}
    assert joined["tokens"] == logprobs["tokens"] and joined["text_offset"] == logprobs["text_offset"]
    assert joined["token_logprobs"] == pytest.approx(logprobs["token_logprobs"], abs=1e-3)


def test_echo_of_the_prompt_alone(http: httpx.Client) -> None:
    """A prompt is scored without an answer: max_tokens 0 with echo."""
    answer = complete(http, echo=True, logprobs=0, max_tokens=0).json()
    assert answer["choices"][0]["text"] == GREEN
    assert answer["usage"]["completion_tokens"] == 0
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    refused(complete(http, max_tokens=0), 400, "max_tokens", param="max_tokens")


def test_length_limits(http: httpx.Client, limit: int) -> None:
    """TRAP-7: the exact room is taken; one more is a 400 with the true numbers; none runs to the limit."""
    ids = http.post("/tokenize", json={"prompt": GREEN}).json()["tokens"]
    ids = (ids * limit)[: limit - 20]
    room = limit - len(ids)
    base = {"prompt": ids, "ignore_eos": True}
    fits = complete(http, **base, max_tokens=room).json()
    assert fits["usage"]["total_tokens"] == limit and fits["choices"][0]["finish_reason"] == "length"
    over = complete(http, **base, max_tokens=room + 1)
    refused(over, 400, f"{limit} tokens", str(len(ids)), f"max_tokens={room + 1}", str(limit + 1), param="max_tokens")
    assert over.json()["error"]["code"] == "context_length_exceeded"
    free = http.post("/v1/completions", json={**base, "temperature": 0}).json()
    assert free["usage"]["total_tokens"] == limit and free["choices"][0]["finish_reason"] == "length"
    refused(complete(http, prompt=(ids * 2)[:limit]), 400, f"{limit} tokens")
    cut = complete(http, prompt=(ids * 2)[:limit], truncate_prompt_tokens=5).json()
    assert cut["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "place"),
    [([], "prompt"), ([[]], "prompt[0]"), (None, "prompt"), ({"a": 1}, "prompt"), ([1, "a"], "prompt[1]")],
)
def test_empty_and_invalid_prompts(http: httpx.Client, prompt: Any, place: str) -> None:
    """TRAP-8: the error names the prompt's place, and the next request works."""
    refused(complete(http, prompt=prompt), 400, place, param="prompt")
    assert complete(http).status_code == 200


@pytest.mark.parametrize("prompt", ["", [""], ["ok", ""]])
def test_empty_texts(http: httpx.Client, prompt: Any) -> None:
    """TRAP-8: an empty text is a 400 naming it, or starts from the tokenizer's own first token."""
    response = complete(http, prompt=prompt)
    if http.post("/tokenize", json={"prompt": ""}).json()["count"]:
        assert response.status_code == 200
    else:
        refused(response, 400, "empty", param="prompt")
    assert complete(http).status_code == 200


@pytest.mark.parametrize("messages", [[], None, "x", [{}], [{"role": "user", "content": 3}], [7]])
def test_invalid_messages(http: httpx.Client, messages: Any) -> None:
    """TRAP-8: messages that are none are a 400 naming the field."""
    refused(chat(http, messages=messages), 400, "messages")
    assert chat(http, messages=[{"role": "user", "content": ""}]).status_code == 200


def test_null_and_list_contents(http: httpx.Client) -> None:
    """TRAP-9: a history with a null content and a tool call is answered; a list of one text is that text."""
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"q": 1}'}}
    history = [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "user", "content": "and?"},
    ]
    assert chat(http, messages=history).status_code == 200
    ids = http.post("/tokenize", json={"messages": history}).json()["tokens"]
    assert "None" not in http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    parts = [{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]
    same = [http.post("/tokenize", json={"messages": m}).json()["tokens"] for m in (USER, parts)]
    assert same[0] == same[1]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    refused(chat(http, messages=image), 400, "image_url", "messages[0].content[0]")


@pytest.mark.parametrize("arguments", ['{"q": "a "b" c"}', "", None, "[1, 2]", {"q": 1}])
def test_malformed_tool_call_arguments(http: httpx.Client, arguments: Any) -> None:
    """TRAP-10: what an earlier call's arguments hold never breaks a later turn."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, *USER]
    assert chat(http, messages=history).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("guided_regex", ""),
        ("guided_choice", []),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"colour": "red"}),
        ("best_of", 4),
        ("use_beam_search", True),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_what_cannot_be_honoured_is_refused(http: httpx.Client, field: str, value: Any) -> None:
    """TRAP-11: never a 200 with free text where something else was asked for; the field is named."""
    refused(chat(http, **{field: value}), 400, field, param=field)
    assert chat(http, response_format={"type": "text"}, best_of=1, some_unknown_field=1).status_code == 200
    refused(complete(http, suffix="end"), 400, "suffix", param="suffix")


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True), (None, False)]
)
def test_usage_in_streams(client: openai.OpenAI, model: str, options: Any, wanted: bool) -> None:
    """TRAP-15: usage comes only when asked for, in one last chunk without choices, summed over n."""
    extra = {} if options is None else {"stream_options": options}
    stream: Any = client.chat.completions.create(
        model=model, messages=USER, n=3, max_tokens=5, stream=True, extra_body={"ignore_eos": True}, **extra
    )
    chunks = list(stream)
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    assert len(with_usage) == wanted
    if wanted:
        assert chunks[-1] is with_usage[0] and chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 15
    assert all(chunk.choices for chunk in chunks[: -1 if wanted else None])


def test_continuous_usage_and_misplaced_options(http: httpx.Client) -> None:
    """Usage in every chunk when asked; stream_options without a stream is refused."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        event["usage"]["completion_tokens"]
        for event in streamed(http, "/v1/completions", {"prompt": GREEN, "max_tokens": 4, "stream_options": options})
    ]
    assert counts == sorted(counts) and counts[0] >= 1
    refused(chat(http, stream_options={"include_usage": True}), 400, "stream_options", param="stream_options")


def test_request_ids(http: httpx.Client) -> None:
    """TRAP-16: two requests in flight under one id both get their own answer, and the id back."""

    def ask(prompt: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "request_id": "twin"}
        return http.post("/v1/completions", json=body, headers={"X-Request-Id": "twin"})

    alone = {prompt: ask(prompt).json()["choices"][0]["text"] for prompt in ("one fox", "two foxes")}
    with ThreadPoolExecutor(2) as pool:
        for prompt, response in zip(alone, pool.map(ask, alone), strict=True):
            assert response.headers["X-Request-Id"] == "twin"
            assert response.json()["choices"][0]["text"] == alone[prompt]
    assert http.get("/health", headers={"X-Request-Id": "a" * 300}).headers["X-Request-Id"] != "a" * 300
    assert http.get("/health").headers["X-Request-Id"]


HOSTILE = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    (b'"x"', "object"),
    (b'{"prompt": NaN}', "JSON"),
    (b'{"prompt": "x", "temperature": Infinity}', "JSON"),
    (b'{"prompt": "\\ud800"}', "JSON"),
    (b'{"prompt": "\xff"}', "JSON"),
    (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "JSON"),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt"),
    (b'{"prompt": "x", "messages": ' + b"[" * 900 + b"]" * 900 + b', "n": "1"}', "n"),
    (b'{"prompt": "x", "seed": 1e400}', ""),
    (b'{"prompt": "x", "seed": 99999999999999999999999999}', "seed"),
    (b'{"prompt": "x", "max_tokens": 99999999999999999999}', "max_tokens"),
    (b'{"prompt": "x", "max_tokens": 9223372036854775807}', "max_tokens"),
    (b'{"prompt": "x", "max_tokens": -1}', "max_tokens"),
    (b'{"prompt": "x", "n": 0}', "n"),
    (b'{"prompt": "x", "n": 1000000}', "n"),
    (b'{"prompt": "x", "temperature": -1}', "temperature"),
    (b'{"prompt": "x", "temperature": "hot"}', "temperature"),
    (b'{"prompt": "x", "top_p": 0}', "top_p"),
    (b'{"prompt": "x", "top_k": 1.5}', "top_k"),
    (b'{"prompt": "x", "logprobs": 1000}', "logprobs"),
    (b'{"prompt": "x", "logprobs": true}', "logprobs"),
    (b'{"prompt": "x", "stop": [1]}', "stop"),
    (b'{"prompt": "x", "stop": [""]}', "stop"),
    (b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias"),
    (b'{"prompt": "x", "logit_bias": {"99999999": 1}}', "logit_bias"),
    (b'{"prompt": "x", "logit_bias": [1]}', "logit_bias"),
    (b'{"prompt": "x", "stop_token_ids": [-5]}', "stop_token_ids"),
    (b'{"prompt": "x", "allowed_token_ids": []}', "allowed_token_ids"),
    (b'{"prompt": "x", "stream": "yes"}', "stream"),
    (b'{"prompt": "x", "stream_options": 3}', "stream_options"),
    (b'{"prompt": "x", "model": 3}', "model"),
    (b'{"prompt": "x", "cache_salt": ""}', "cache_salt"),
    (b'{"prompt": "x", "priority": "high"}', "priority"),
    (b'{"prompt": "x", "min_tokens": 5, "max_tokens": 2}', "min_tokens"),
    (b'{"prompt": "x", "truncate_prompt_tokens": 0}', "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("body", "word"), HOSTILE, ids=[str(i) for i in range(len(HOSTILE))])
def test_hostile_bodies(http: httpx.Client, body: bytes, word: str) -> None:
    """Whatever is sent, the answer is a 400 in OpenAI's shape that names the field, and the server goes on."""
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    refused(response, 400, word)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_every_endpoint_survives_nonsense(http: httpx.Client, path: str) -> None:
    """Wrong bodies at every endpoint are a 400; a wrong method or path is a 405 or 404 in the same shape."""
    for body in (b"\x00", b"{}", b'{"messages": {}, "prompt": 4, "tokens": {}}'):
        refused(http.post(path, content=body), 400)
    refused(http.get(path), 405, "GET")
    refused(http.post(path + "/more", json={}), 404)


@pytest.mark.parametrize("text", ["z" * 40_000, " " * 40_000, "\U0001f99c" * 20_000, "z" * 10_000_000])
def test_long_prompts(http: httpx.Client, text: str) -> None:
    """TRAP-23: a long run of one character class is answered or refused for its length, quickly, beside others."""
    with ThreadPoolExecutor(1) as pool:
        start = time.monotonic()
        big = pool.submit(chat, http, messages=[{"role": "user", "content": text}])
        assert http.get("/health").status_code == 200
        assert time.monotonic() - start < 5
        response = big.result()
    assert time.monotonic() - start < 20
    if response.status_code != 200:
        refused(response, 400, "tokens")
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_body_over_the_limit(http: httpx.Client) -> None:
    """A body over the limit is a 413, declared or chunked, and the server goes on."""
    size = 17 << 20
    refused(http.post("/v1/completions", content=b"x" * size), 413, "limit")
    refused(http.post("/v1/completions", content=(b"x" * (1 << 20) for _ in range(17))), 413, "limit")
    assert http.get("/health").status_code == 200


def test_metrics_are_well_formed(http: httpx.Client) -> None:
    """TRAP-14: counters end in _total, no gauge is negative, and nothing was compiled after ready."""
    from prometheus_client.parser import text_string_to_metric_families

    complete(http)
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    for family in families.values():
        for sample in family.samples:
            assert sample.value >= 0, sample
            if family.type == "counter":
                assert sample.name.endswith("_total"), sample
    assert families["treadle_compilations_after_ready"].samples[0].value == 0
    for name in ("treadle_num_requests_running", "vllm:num_requests_running", "vllm:time_to_first_token_seconds"):
        assert families[name].samples
    assert families["vllm:generation_tokens"].samples[0].labels["model_name"]


def test_probes(http: httpx.Client) -> None:
    """Probes answer."""
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json()["version"]


def test_unknown_errors_say_nothing() -> None:
    """An error that is our own fault is a 500 without its text."""
    error = as_api_error(RuntimeError("the password is 123"))
    assert isinstance(error, ApiError) and error.status == 500 and "123" not in error.message
