"""How the server ends, refuses and protects itself, against an engine whose every move is scripted."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import Any

import httpx
import pytest

from tests.server.conftest import RunningServer, StartServer
from tests.server.fake_engine import FakeInfo
from treadle.ir.errors import ConfigError
from treadle.server.config import ServerConfig
from treadle.server.launch import listen

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LONG = {**CHAT, "max_tokens": 150, "ignore_eos": True}


def post(server: RunningServer, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
    return httpx.post(server.base_url + path, timeout=30, verify=False, **options)


def get(server: RunningServer, path: str, **options: Any) -> httpx.Response:
    return httpx.get(server.base_url + path, timeout=30, verify=False, **options)


def metric(server: RunningServer, name: str) -> float:
    for line in get(server, "/metrics").text.splitlines():
        if line.startswith(name + " ") or line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def eventually(check: Any, within: float = 5.0) -> None:
    deadline = time.monotonic() + within
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def nothing_runs(server: RunningServer) -> bool:
    return not server.engine.running and server.state.admission.num_inflight == 0


def raw_request(server: RunningServer, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """Sends a request over a bare socket, to be able to break off or not to read."""
    connection = socket.create_connection(("127.0.0.1", int(server.base_url.rsplit(":", 1)[1])), timeout=30)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_a_closed_stream_is_aborted(start_server: StartServer) -> None:
    """TRAP-14: five streams are closed after their first chunk; each counts once and nothing goes on running."""
    server = start_server(delay=0.02)
    for n in (1, 1, 1, 3, 3):
        connection = raw_request(server, {**LONG, "stream": True, "n": n})
        assert b"200 OK" in connection.recv(4096)
        connection.close()
    eventually(lambda: nothing_runs(server), within=2)
    assert metric(server, "treadle_requests_aborted_total") == 5
    assert metric(server, "treadle_sequences_aborted_total") == 9
    assert metric(server, "treadle_num_requests_running") == 0
    assert server.state.running == set()


def test_a_closed_whole_request_is_aborted(start_server: StartServer) -> None:
    """A client that does not wait for a whole answer, or for one of several prompts, ends it in the engine too."""
    server = start_server(delay=0.05)
    for body, path in ((LONG, "/v1/chat/completions"), ({**LONG, "prompt": ["a", "b"]}, "/v1/completions")):
        connection = raw_request(server, body, path)
        eventually(lambda: server.engine.running)
        connection.close()
        eventually(lambda: nothing_runs(server), within=2)
    assert metric(server, "treadle_requests_aborted_total") == 2


def test_a_request_that_waits_is_aborted(start_server: StartServer) -> None:
    """A request that has not started yet leaves the queue when its client goes."""
    server = start_server(delay=0.05, slots=1)
    first = raw_request(server, {**LONG, "stream": True})
    eventually(lambda: server.engine.running)
    second = raw_request(server, LONG)
    eventually(lambda: server.engine._waiting == 1)
    second.close()
    eventually(lambda: server.engine._waiting == 0)
    first.close()
    eventually(lambda: nothing_runs(server))


def test_a_hundred_streams_half_cancelled(start_server: StartServer) -> None:
    """Issue line 7: of 100 concurrent streams half are cancelled at random; none is left running, the rest are whole."""
    server = start_server(delay=0.004, slots=16)
    chance = random.Random(7)
    cancel = set(chance.sample(range(100), 50))

    async def one(client: httpx.AsyncClient, index: int) -> str:
        body = {"prompt": f"stream {index}", "stream": True, "max_tokens": 40, "ignore_eos": True}
        after, text = chance.randrange(1, 20), ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    after -= 1
                if index in cancel and after <= 0:
                    return ""
        raise AssertionError("a stream ended without [DONE]")

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60, limits=limits, verify=False) as client:
            return await asyncio.gather(*(one(client, index) for index in range(100)))

    texts = asyncio.run(all_of_them())
    eventually(lambda: nothing_runs(server))
    assert metric(server, "treadle_num_requests_running") == metric(server, "treadle_num_requests_waiting") == 0
    server.engine.delay = 0
    for index in set(range(100)) - cancel:
        whole = post(server, "/v1/completions", json={"prompt": f"stream {index}", "max_tokens": 40, "ignore_eos": True})
        assert texts[index] == whole.json()["choices"][0]["text"]


def test_engine_death(start_server: StartServer) -> None:
    """TRAP-17: an open stream ends with an error, /health is a 503, a new request is a 503, metrics can be read."""
    server = start_server(delay=0.02)
    events: list[str] = []
    with httpx.stream("POST", server.base_url + "/v1/chat/completions", json={**LONG, "stream": True}) as response:
        for line in response.iter_lines():
            events += [line] if line else []
            if len(events) == 3:
                server.engine.crash()
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error["code"] == "engine_dead" and "signal 9" in error["message"]
    for path in ("/health", "/ready"):
        assert get(server, path).status_code == 503
    refusal = post(server, json=CHAT)
    assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "engine_dead"
    assert get(server, "/metrics").status_code == 200
    eventually(lambda: nothing_runs(server))


def test_engine_death_during_a_whole_answer(start_server: StartServer) -> None:
    """TRAP-17: a request that waits for its whole answer gets a 503."""
    server = start_server(delay=0.02)
    connection = raw_request(server, LONG)
    eventually(lambda: server.engine.running)
    server.engine.crash()
    assert b"503" in connection.recv(4096)


def test_api_keys(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    """Any of several keys opens the API; probes and metrics are open; no key appears in a log, an answer or a repr."""
    caplog.set_level("DEBUG")
    server = start_server({"api_keys": ("key-one-5511", "kéy-two-5512")})
    for header in ("", "Bearer", "Bearer wrong-5513", "Basic key-one-5511", "key-one-5511", "Bearer key-one-5511x"):
        response = post(server, json=CHAT, headers={"Authorization": header} if header else {})
        assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "5513" not in response.text
    for path in ("/v1/models", "/openapi.json", "/nothing"):
        assert get(server, path).status_code == 401
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert get(server, path).status_code == 200
    for key in (b"Bearer key-one-5511", "bearer  kéy-two-5512".encode()):
        assert post(server, json=CHAT, headers={b"Authorization": key}).status_code == 200
    said = caplog.text.replace("key-one-5511x", "")
    assert not [part for part in ("key-one-5511", "two-5512", "wrong-5513") if part in said]
    assert "5511" not in repr(server.state.__dict__.get("_key_digests"))


def test_back_pressure(start_server: StartServer) -> None:
    """Beyond the limit a request is a 503 with Retry-After; when a place is free again it is taken."""
    server = start_server({"max_inflight_requests": 2, "retry_after": 7}, delay=0.05)
    held = [raw_request(server, {**LONG, "stream": True}) for _ in range(2)]
    eventually(lambda: server.state.admission.num_inflight == 2)
    refusal = post(server, json=CHAT)
    assert refusal.status_code == 503 and refusal.headers["Retry-After"] == "7"
    assert refusal.json()["error"]["code"] == "overloaded"
    assert get(server, "/health").status_code == 200
    held[0].close()
    eventually(lambda: server.state.admission.num_inflight == 1)
    assert post(server, json={**CHAT, "max_tokens": 2}).status_code == 200
    held[1].close()


def test_refused_requests_leave_no_place_taken(start_server: StartServer) -> None:
    """Every way to be refused gives its place back."""
    server = start_server({"max_inflight_requests": 1, "max_body_bytes": 1000})
    for body in ({"messages": []}, {**CHAT, "model": "x"}, {**CHAT, "n": "x"}, {**CHAT, "pad": "x" * 1000}):
        assert post(server, json=body).status_code in (400, 404, 413)
        assert post(server, json={**CHAT, "stream": True, "max_tokens": 10_000}).status_code == 400
        assert server.state.admission.num_inflight == 0
    assert post(server, json=CHAT).status_code == 200


def test_a_reader_that_stalls_is_cut(start_server: StartServer) -> None:
    """A client that leaves its stream unread loses it after the stall timeout; what waits for it is bounded."""
    server = start_server({"stall_timeout": 0.3}, script=[70] * 200, info=None, delay=0.0)
    connection = raw_request(server, {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 40})
    eventually(lambda: nothing_runs(server) and server.engine.seen, within=20)
    assert metric(server, "treadle_requests_aborted_total") == 1
    connection.close()


def test_a_slow_body_times_out(start_server: StartServer) -> None:
    """A client that does not send the body it announced gets a 408."""
    server = start_server({"body_timeout": 0.2})
    connection = socket.create_connection(("127.0.0.1", int(server.base_url.rsplit(":", 1)[1])), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert b"408" in connection.recv(4096)
    connection.close()
    eventually(lambda: nothing_runs(server))


def test_reset_prefix_cache(start_server: StartServer) -> None:
    """Refused while requests hold blocks, unless they may start over; a wrong value is a 400, a dead engine a 503."""
    server = start_server({"api_keys": ("k",)}, delay=0.02)
    key = {"headers": {"Authorization": "Bearer k"}}
    assert post(server, "/reset_prefix_cache").status_code == 401
    assert post(server, "/reset_prefix_cache", **key).status_code == 200 and server.engine.num_resets == 1
    with httpx.stream("POST", server.base_url + "/v1/chat/completions", json={**LONG, "stream": True}, **key) as response:
        lines = response.iter_lines()  # kept: dropped, it would close the stream
        next(lines)
        refused = post(server, "/reset_prefix_cache", **key)
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "prefix_cache_in_use"
        assert server.engine.num_resets == 1
        assert post(server, "/reset_prefix_cache?reset_running_requests=true", **key).status_code == 200
        assert server.engine.num_resets == 2
    wrong = post(server, "/reset_prefix_cache?reset_running_requests=7", **key)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "reset_running_requests"
    assert get(server, "/reset_prefix_cache", **key).status_code == 405
    server.engine.crash()
    assert post(server, "/reset_prefix_cache", **key).status_code == 503


def test_minus_infinity_is_json(start_server: StartServer) -> None:
    """TRAP-4: a logprob of minus infinity reaches the client as a number, streamed and whole."""
    server = start_server(lowest=float("-inf"))
    body = {**CHAT, "logprobs": True, "top_logprobs": 3, "max_tokens": 3, "prompt_logprobs": 2}
    for answer in (post(server, json=body), post(server, json={**body, "stream": True})):
        assert answer.status_code == 200
        assert "-9999" in answer.text and "Infinity" not in answer.text and "NaN" not in answer.text


def test_characters_over_several_tokens_stream_whole(start_server: StartServer) -> None:
    """TRAP-1: joined deltas equal the whole text, and no U+FFFD comes before the last chunk."""
    server = start_server()
    parrot = server.engine.renderer.encode("\U0001f99c\u0e01\u65e5")
    server.engine.script = [*parrot, 2]
    for limit in (len(parrot) + 1, 2):
        body = {**CHAT, "max_tokens": limit}
        whole = post(server, json=body).json()["choices"][0]["message"]["content"]
        lines = [line for line in post(server, json={**body, "stream": True}).text.split("\n\n") if line][:-1]
        deltas = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines]
        assert "".join(deltas) == whole
        assert "\ufffd" not in "".join(deltas[:-1])


def test_model_defaults_and_neutral_ones(start_server: StartServer) -> None:
    """C14-06: sampling defaults come from the model; the request wins; the option restores neutral ones."""
    generation = {"temperature": 0.6, "top_k": 7, "max_new_tokens": 5}
    for mode, temperature, length in (("auto", 0.6, 5), ("vllm", 1.0, None)):
        server = start_server({"generation_config": mode}, generation_config=generation)
        assert post(server, json={**CHAT, "top_k": 3}).status_code == 200
        _, params = server.engine.seen[-1]
        assert params.temperature == temperature and params.top_k == 3
        assert length is None or params.max_tokens == length


def test_sampling_fields_reach_the_engine(start_server: StartServer) -> None:
    """vLLM's extra sampling parameters arrive under the same names."""
    server = start_server()
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 11,
        "stop": "x",
        "stop_token_ids": [7],
        "min_tokens": 1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "logit_bias": {"5": 1.0},
        "allowed_token_ids": [5, 6],
        "bad_words": ["no"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "prompt_logprobs": 2,
        "n": 2,
    }
    assert post(server, json={**CHAT, **asked, "max_completion_tokens": 9}).status_code == 200
    _, params = server.engine.seen[-1]
    expected = {**asked, "stop": ["x"], "logit_bias": {5: 1.0}, "max_tokens": 9}
    assert {name: getattr(params, name) for name in expected} == expected
    refusal = post(server, json={**CHAT, "max_tokens": 3, "max_completion_tokens": 4})
    assert refusal.status_code == 400 and refusal.json()["error"]["param"] == "max_tokens"


def test_a_model_without_a_template(start_server: StartServer) -> None:
    """A chat with a model that has no template is a clear 400; completions work."""
    server = start_server(template=None)
    response = post(server, json=CHAT)
    assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
    assert post(server, "/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_tools_reach_the_prompt(start_server: StartServer) -> None:
    """TRAP-9: tools the template cannot show are described in the system message, unless they are switched off."""
    server = start_server(info=FakeInfo(max_model_len=2048))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for choice, shown in (("auto", True), ("none", False)):
        assert post(server, json={**CHAT, "tools": tools, "tool_choice": choice}).status_code == 200
        assert ('"name": "f"' in server.engine.renderer.decode(server.engine.seen[-1][0])) == shown
    shown = start_server(template="{{ tools | tojson }}{{ messages[0].content }}")
    assert post(shown, json={**CHAT, "tools": tools}).status_code == 200
    assert shown.engine.renderer.decode(shown.engine.seen[-1][0]).startswith('[{"type": "function"')


def test_unknown_fields_are_warned_about_once(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown field is accepted, and logged with the field it resembles."""
    server = start_server()
    for _ in range(2):
        assert post(server, json={**CHAT, "temprature": 1}).status_code == 200
    assert caplog.text.count("temprature") == 1 and "temperature" in caplog.text


def test_errors_of_our_own_are_a_500_without_the_cause(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    """An unforeseen error is a 500 in the same shape; its cause is in the log only."""
    server = start_server()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret cause")

    server.engine.generate = broken  # type: ignore[method-assign]
    for body in (CHAT, {**CHAT, "stream": True}):
        response = post(server, json=body)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error" and "secret" not in response.text
    assert "secret cause" in caplog.text
    eventually(lambda: nothing_runs(server))


def test_server_config_checks_itself() -> None:
    """Settings out of range, and an address that is taken, are errors that say so."""
    cases: list[dict[str, Any]] = [{"port": 70000}, {"api_keys": ("",)}, {"max_body_bytes": 0}]
    for bad in cases:
        with pytest.raises(ConfigError):
            ServerConfig(**bad)
    with listen(ServerConfig(port=0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1"):
            listen(ServerConfig(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="choose another --host"):
        listen(ServerConfig(host="no such host", port=0))
