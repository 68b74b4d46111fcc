"""`treadle bench serve`: schedules, streams, measures, and whole runs against a server over the fake engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import uvloop
from typer.testing import CliRunner

from tests.server.conftest import StartServer
from treadle.ir.errors import ConfigError, TreadleError
from treadle.server.bench.client import Client
from treadle.server.bench.http_stream import EventReader, Timed
from treadle.server.bench.load import Address, ServeLoad, parse_limits, requests, schedule
from treadle.server.bench.measures import latencies, measure_requests
from treadle.server.bench.null_server import null_server
from treadle.server.bench.overhead import simplest_client
from treadle.server.cli import app

STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"a\\u00e9"}}]}\r\n\r\n: a comment\n\n'
    b'data:{"choices":[{"index":0,"text":" b"}],"error":null}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":null,"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\ndata: [DONE]\n\n'
)


def load(**changes: Any) -> ServeLoad:
    return ServeLoad(**{"num_prompts": 6, "concurrency": 2, "input_len": 8, "output_len": 5} | changes)


def bench(url: str, *arguments: object) -> Any:
    small = ["--num-prompts", 6, "--input-len", 8, "--output-len", 5, "--warmup", 1]
    return CliRunner().invoke(app, [str(word) for word in ["bench", "serve", "--base-url", url, *small, *arguments]])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_however_the_bytes_are_cut(size: int) -> None:
    """Only chunks with text or parts of a tool call are tokens; the usage is the last chunk's."""
    timed = Timed(0.0)
    reader = EventReader(timed)
    for moment, at in enumerate(range(0, len(STREAM), size)):
        reader.feed(STREAM[at : at + size], float(moment))
    assert len(timed.arrivals) == 3 and timed.finished and timed.error is None
    assert (timed.prompt_tokens, timed.completion_tokens) == (7, 5)


@pytest.mark.parametrize(("event", "words"), [(b'{"error":{"message":"full"}}', "full"), (b"{oops", "not what the API says")])
def test_bad_events_are_errors(event: bytes, words: str) -> None:
    timed = Timed(0.0)
    EventReader(timed).feed(b"data: " + event + b"\n\n", 1.0)
    assert timed.error is not None and words in timed.error


def test_schedules() -> None:
    """Poisson keeps the rate on average, constant exactly, bursts come together; a seed repeats them."""
    moments = schedule(load(num_prompts=4000, concurrency=None, request_rate=50.0))
    assert moments == sorted(moments) and moments[-1] == pytest.approx(80, rel=0.1)
    assert moments == schedule(load(num_prompts=4000, concurrency=None, request_rate=50.0))
    assert schedule(load(concurrency=None, request_rate=2.0, arrival="constant"))[:3] == [0, 0.5, 1]
    assert schedule(load(concurrency=None, request_rate=3.0, arrival="burst", burst_size=3)) == [0, 0, 0, 1, 1, 1]
    assert schedule(load(concurrency=None, request_rate=math.inf)) == [0] * 6


def test_requests_are_whole_and_share_their_prefix() -> None:
    made = requests(load(shared_prefix=4, extra_body={"top_k": 1}), Address.parse("http://h:1/x/v1"), "m", 3, "key")
    heads, bodies = zip(*(request.split(b"\r\n\r\n") for request in made), strict=True)
    assert heads[0].startswith(b"POST /x/v1/completions HTTP/1.1\r\nHost: h:1\r\n") and b"Bearer key" in heads[0]
    assert b"Content-Length: %d" % len(bodies[0]) in heads[0]
    texts = [json.loads(body)["prompt"].split() for body in bodies]
    assert len({tuple(text[:4]) for text in texts}) == 1 and len({tuple(text[4:]) for text in texts}) == 3
    assert {len(text) for text in texts} == {12} and json.loads(bodies[0])["top_k"] == 1


def test_latency_counts_from_when_a_request_was_due() -> None:
    """A client that got to send late does not make a server look fast; TPOT divides by the server's count of tokens."""
    late = Timed(10.0, sent=14.0, ended=15.0, arrivals=[14.5, 14.9], completion_tokens=5)
    assert latencies(late) == pytest.approx({"ttft": 4500, "tpot": 100, "e2e": 5000})
    failed = Timed(10.0, sent=10.0, ended=11.0, error="HTTP 503: full")
    found = measure_requests([late, failed], {"ttft": 5000.0})
    assert (found["failed"], found["errors"], found["e2e_ms"]["count"]) == (1, {"HTTP 503: full": 1}, 1)
    assert found["goodput"]["share"] == 0.5 and found["itl_ms"]["median"] == pytest.approx(400)
    assert measure_requests([late], {"ttft": 4000.0})["goodput"]["share"] == 0


def test_limits() -> None:
    assert parse_limits(["ttft:200 tpot:50", "e2e:1e3"]) == {"ttft": 200, "tpot": 50, "e2e": 1000}
    for wrong in ("ttft", "ttft:x", "speed:1"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_limits([wrong])


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"request_rate": 1.0}, "give one of"), ({"concurrency": None}, "give one of"), ({"endpoint": "x"}, "completions, chat"),
     ({"concurrency": None, "request_rate": 0.0}, "above 0"), ({"arrival": "x"}, "poisson, constant, burst")],
)  # fmt: skip
def test_loads_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(**changes)


def test_both_clients_see_the_null_servers_whole_streams() -> None:
    """Every token is counted, connections are used again, and neither client ends before the pace allows."""

    async def run(address: Address, bodies: list[bytes]) -> tuple[list[Timed], int]:
        client = Client(address, timeout=30)
        try:
            return await client.closed_loop(bodies, 2), client.most_open
        finally:
            client.close()

    with null_server(5, 0.01) as port:
        address = Address("127.0.0.1", port)
        bodies = requests(load(), address, "null", 6, None)
        timed, most = uvloop.run(run(address, bodies))
        assert most == 2 and [len(t.arrivals) for t in timed] == [5] * 6 and {t.completion_tokens for t in timed} == {5}
        assert all(t.error is None and t.ended - t.sent >= 0.045 for t in timed)
        assert len(simplest_client(port, bodies)) == 6


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_closed_loop_against_our_server(start_server: StartServer, tmp_path: Path, endpoint: str) -> None:
    """The report holds what was run, the plot parses, and the warm-up is not counted."""
    server = start_server()
    output, plot = tmp_path / "r.json", tmp_path / "p.svg"
    limits = ["--goodput", "ttft:60000 tpot:60000"]
    result = bench(server.base_url, "--concurrency", 2, "--endpoint", endpoint, *limits, "--output", output, "--plot", plot)
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(output.read_text())
    results = report["results"]
    assert (results["requests"], results["failed"], results["output_tokens"]) == (6, 0, 30)
    assert results["most_open"] == 2 and results["prompt_tokens"] > 0 and results["goodput"]["share"] == 1
    assert len(server.engine.seen) == 7 and server.engine.most_running <= 2
    assert results["client_overhead"]["concurrency"] == 2 and "this client adds" in result.output
    assert report["server"]["model"] == "fake" and report["hardware"] and report["versions"]
    assert len(ElementTree.fromstring(plot.read_text()).findall(".//{*}polyline")) == 3


def test_an_open_loop_does_not_wait_for_answers(start_server: StartServer) -> None:
    server = start_server(delay=0.05)
    result = bench(server.base_url, "--request-rate", "inf")
    assert result.exit_code == 0, (result.output, result.exception)
    assert server.engine.most_running == 6


def test_servers_that_refuse_or_are_not_there(start_server: StartServer) -> None:
    """A run of failures alone is an error with the server's own words."""
    server = start_server()
    refused = bench(server.base_url, "--concurrency", 1, "--model", "another")
    assert isinstance(refused.exception, TreadleError) and "all 6 requests failed: HTTP 404" in str(refused.exception)
    absent = bench("http://127.0.0.1:1", "--concurrency", 1)
    assert isinstance(absent.exception, TreadleError) and "no server at" in str(absent.exception)
    assert "should look like" in str(bench("127.0.0.1:8000", "--concurrency", 1).exception)


def test_a_plot_has_one_format(tmp_path: Path) -> None:
    assert ".svg" in str(bench("http://127.0.0.1:1", "--concurrency", 1, "--plot", tmp_path / "p.png").exception)
