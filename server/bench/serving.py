"""A whole run of `treadle bench serve`: find the model, warm up, measure, then measure the client itself."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import uvloop

from treadle.ir.errors import TreadleError, UserError
from treadle.server.bench.client import Client
from treadle.server.bench.http_stream import Timed
from treadle.server.bench.load import Address, ServeLoad, requests, schedule
from treadle.server.bench.measures import measure_requests
from treadle.server.bench.overhead import measure_overhead
from treadle.server.bench.tables import summary_lines

_TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "send_delay_ms")
_ASK_SECONDS = 30


def first_model(address: Address, api_key: str | None) -> str:
    """The first name that /v1/models lists. Raises TreadleError if the server cannot be asked."""
    request = urllib.request.Request(address.url("/v1/models"), headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as answer:
            return json.load(answer)["data"][0]["id"]
    except urllib.error.HTTPError as error:
        error.close()
        raise TreadleError(f"{address.url('/v1/models')} answers {error.code}; give --model, and TREADLE_API_KEY if it wants a key") from error
    except OSError as error:
        raise TreadleError(f"no server at {address.url('')}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{address.url('/v1/models')} lists no model; give --model") from error


def measure_serve(
    address: Address, model: str, load: ServeLoad, *, warmup: int, timeout: float, limits: Mapping[str, float], api_key: str | None
) -> tuple[dict[str, Any], list[Timed]]:
    """(results with the client's own overhead, the requests). Raises TreadleError if every request failed."""
    prepared = requests(load, address, model, load.num_prompts, api_key)
    warming = requests(load, address, model, warmup, api_key, salt=1)
    timed, most_open = uvloop.run(_run(address, load, prepared, warming, timeout))
    results = measure_requests(timed, limits)
    if results["failed"] == len(timed):
        raise TreadleError(f"all {len(timed)} requests failed: {next(iter(results['errors']))}")
    results["most_open"] = most_open
    results["client_overhead"] = measure_overhead(most_open, load)
    return results, timed


async def _run(
    address: Address, load: ServeLoad, prepared: list[bytes], warming: list[bytes], timeout: float
) -> tuple[list[Timed], int]:
    client = Client(address, timeout)
    try:
        await client.closed_loop(warming, load.concurrency or 1)
        client.most_open = 0
        if load.concurrency is not None:
            return await client.closed_loop(prepared, load.concurrency), client.most_open
        return await client.open_loop(prepared, schedule(load)), client.most_open
    finally:
        client.close()


def serve_lines(results: Mapping[str, Any]) -> list[str]:
    """What `bench serve` prints."""
    lines = [f"{results['requests']} requests in {results['seconds']:.2f} s, {results['failed']} failed, at most {results['most_open']} at once"]
    lines += [f"  {count} times: {error}" for error, count in results["errors"].items()]
    rates = (f"{results[name]:.2f} {name.removesuffix('_per_second').replace('_', ' ')}/s" for name in results if name.endswith("_per_second"))
    lines += [", ".join(rates), *summary_lines({name.replace("_ms", ", ms").replace("_", " "): results[name] for name in _TIMES})]
    if goodput := results.get("goodput"):
        within = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["limits_ms"].items())
        lines.append(f"goodput within {within}: {goodput['requests_per_second']:.2f} requests/s, {goodput['share']:.1%} of all")
    own = results["client_overhead"]
    return [
        *lines,
        f"client against a null server, {own['concurrency']} streams: {own['client_e2e_ms']:.1f} ms; "
        f"simplest client {own['simplest_client_e2e_ms']:.1f} ms; this client adds {own['added_share']:+.1%}",
    ]
