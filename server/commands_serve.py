"""`treadle serve`: the HTTP server in this process, the engine core in its own. Imports no torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Annotated, Any

import typer
import uvloop

from treadle.codegen.bundle import is_bundle, open_bundle
from treadle.ir.config import Resolved, resolve
from treadle.ir.errors import BundleError
from treadle.runtime.config import EngineConfig
from treadle.runtime.levels import resolve_engine, settle_engine
from treadle.server.config import ServerConfig
from treadle.server.environment import take_api_keys

logger = logging.getLogger(__name__)
app = typer.Typer(add_completion=False)

_ENGINE, _SERVER, _LIMITS = "Engine", "Server", "Limits"


def _option(flag: str, doc: str, panel: str) -> Any:
    return typer.Option(flag, help=doc, rich_help_panel=panel, show_default=False)


@app.command(help="Serve a bundle over the OpenAI API, until SIGTERM. Settings not given are the bundle's or automatic.")
def serve(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="BUNDLE_OR_MODEL", help="A bundle, or a model to compile first.")],
    level: Annotated[
        int | None, _option("-O", "Optimization level of the defaults, 0 to 3 (default: the bundle's).", _ENGINE)
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Show what was asked for, defaults and effective settings, and end.", rich_help_panel=_SERVER),
    ] = False,
    host: Annotated[str | None, _option("--host", "Address to listen on (default: 127.0.0.1).", _SERVER)] = None,
    port: Annotated[int | None, _option("--port", "Port to listen on (default: 8000); 0: any.", _SERVER)] = None,
    api_key: Annotated[
        list[str] | None,
        _option("--api-key", "Key callers must bring; may be repeated. Better: TREADLE_API_KEY.", _SERVER),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, _option("--served-model-name", "Name callers use; may be repeated.", _SERVER)
    ] = None,
    require_artifacts: Annotated[
        bool | None,
        typer.Option(
            "--require-artifacts/--no-require-artifacts",
            help="Refuse to start if anything would have to be compiled (default: yes for a bundle).",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        str | None, _option("--verify", "Public key (PEM) that must have signed the bundle.", _SERVER)
    ] = None,
    generation_config: Annotated[
        str | None, _option("--generation-config", "auto: the model's sampling defaults; vllm: neutral.", _SERVER)
    ] = None,
    drain_timeout: Annotated[
        float | None, _option("--drain-timeout", "Seconds running requests get after SIGTERM (default: 30).", _LIMITS)
    ] = None,
    max_inflight_requests: Annotated[
        int | None, _option("--max-inflight-requests", "Requests at once; more get a 503 (default: 1024).", _LIMITS)
    ] = None,
    max_body_bytes: Annotated[
        int | None, _option("--max-body-bytes", "Largest request body; more is a 413 (default: 16 MiB).", _LIMITS)
    ] = None,
    max_logprobs: Annotated[int | None, _option("--max-logprobs", "Most logprobs a token (default: 20).", _LIMITS)] = None,
    max_stored_responses: Annotated[
        int | None, _option("--max-stored-responses", "Answers of /v1/responses kept in memory (default: 1000).", _LIMITS)
    ] = None,
    max_model_len: Annotated[
        int | None, _option("--max-model-len", "Tokens of one request, prompt and answer.", _ENGINE)
    ] = None,
    max_num_seqs: Annotated[int | None, _option("--max-num-seqs", "Requests in one step (default: 256).", _ENGINE)] = None,
    max_num_batched_tokens: Annotated[
        int | None, _option("--max-num-batched-tokens", "Tokens in one step.", _ENGINE)
    ] = None,
    block_size: Annotated[int | None, _option("--block-size", "Tokens in a KV block (default: 16).", _ENGINE)] = None,
    num_blocks: Annotated[int | None, _option("--num-blocks", "KV blocks of the pool.", _ENGINE)] = None,
    kv_cache_bytes: Annotated[int | None, _option("--kv-cache-bytes", "Bytes of KV cache.", _ENGINE)] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse KV blocks of equal prefixes (default: yes).",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    prefix_hash: Annotated[str | None, _option("--prefix-hash", "sha256 or xxhash (default: sha256).", _ENGINE)] = None,
    scheduling_policy: Annotated[
        str | None, _option("--scheduling-policy", "fcfs or priority (default: fcfs).", _ENGINE)
    ] = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Compute a long prompt over several steps (default: yes).",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None,
        _option("--long-prefill-token-threshold", "Tokens of one prompt in a step while others wait (default: no limit).", _ENGINE),
    ] = None,
    max_num_active_seqs: Annotated[
        int | None, _option("--max-num-active-seqs", "Requests that may run at once (default: --max-num-seqs).", _ENGINE)
    ] = None,
    watermark: Annotated[
        float | None, _option("--watermark", "Share of KV blocks kept free at admission (default: 0.01).", _ENGINE)
    ] = None,
    logprobs_mode: Annotated[
        str | None, _option("--logprobs-mode", "What logprobs show (default: raw_logprobs).", _ENGINE)
    ] = None,
    executor: Annotated[
        str | None, _option("--executor", "An executor's name or module:Class (default: auto, as the bundle needs).", _ENGINE)
    ] = None,
    attention_backend: Annotated[str | None, _option("--attention-backend", "A backend's name (default: auto).", _ENGINE)] = None,
    graph_mode: Annotated[
        str | None,
        _option("--graph-mode", "none, piecewise, full, full_decode_only or full_and_piecewise (default: auto, the most that works).", _ENGINE),
    ] = None,
    structured_output_backend: Annotated[
        str | None, _option("--structured-output-backend", "auto, xgrammar or llguidance (default: auto).", _ENGINE)
    ] = None,
    structured_output_timeout: Annotated[
        float | None, _option("--structured-output-timeout", "Seconds compiling one grammar may take (default: 10).", _LIMITS)
    ] = None,
    structured_output_max_bytes: Annotated[
        int | None, _option("--structured-output-max-bytes", "Largest source of a grammar (default: 1 MiB).", _LIMITS)
    ] = None,
    structured_output_max_depth: Annotated[
        int | None, _option("--structured-output-max-depth", "Deepest nesting of a JSON schema (default: 100).", _LIMITS)
    ] = None,
    tool_call_parser: Annotated[
        str | None, _option("--tool-call-parser", "How the model writes tool calls: a name, none or auto (default: auto).", _SERVER)
    ] = None,
    reasoning_parser: Annotated[
        str | None, _option("--reasoning-parser", "How the model marks reasoning: a name, none or auto (default: auto).", _SERVER)
    ] = None,
    num_threads: Annotated[int | None, _option("--num-threads", "Compute threads.", _ENGINE)] = None,
    seed: Annotated[int | None, _option("--seed", "Seed of requests that bring none (default: 0).", _ENGINE)] = None,
) -> None:
    """Starts, serves and exits with the server's code."""
    given = {name: value for name, value in context.params.items() if value is not None}
    keys = (*(api_key or ()), *take_api_keys())
    names = tuple(served_model_name or ())
    server = resolve(ServerConfig, _of(ServerConfig, given | _some(api_keys=keys, served_model_names=names)))
    chosen = {name: value for name, value in given.items() if name != "served_model_name"} | _some(
        served_model_name=names[:1] and names[0], verify_key=verify
    )
    bundle = _bundle_of(source, require_artifacts, level, only_look=print_config)
    engine = resolve_engine(_of(EngineConfig, chosen | {"bundle": bundle}))
    if print_config:
        _print_config(server, engine)
        return
    _log_settings(server, engine)
    raise typer.Exit(uvloop.run(_serve(server.config, engine.config)))


async def _serve(server: ServerConfig, engine_config: EngineConfig) -> int:
    from treadle.runtime.engine.async_engine import AsyncEngine
    from treadle.server.launch import EXIT_OK, listen, run_server, start_engine

    listener = listen(server)
    engine = AsyncEngine(engine_config)
    if not await start_engine(engine):
        return EXIT_OK
    if engine.renderer is None:
        await engine.shutdown()
        raise BundleError(f"{engine_config.bundle} has no tokenizer, and the API is made of text; use treadle.LLM with token ids")
    return await run_server(engine, server, listener)


def _print_config(server: Resolved[ServerConfig], engine: Resolved[EngineConfig]) -> None:
    from treadle.server.config_text import config_text

    manifest = open_bundle(engine.config.bundle, verify_key=engine.config.verify_key, for_loading=False).manifest
    typer.echo(f"{config_text(settle_engine(engine, manifest))}\n\n{config_text(server)}")


def _bundle_of(source: str, require_artifacts: bool | None, level: int | None, *, only_look: bool) -> str:
    """Returns the folder of the bundle to serve; a model is compiled first unless artifacts are required."""
    if is_bundle(source):
        if require_artifacts is False:
            logger.info("%s is a bundle: nothing will be compiled, with or without --no-require-artifacts", source)
        return source
    if require_artifacts:
        what = f"{source} is not a bundle, and --require-artifacts forbids compiling"
        raise BundleError(f"{what}; run: treadle compile {source} --output BUNDLE")
    if only_look:
        raise BundleError(f"{source} is not a bundle, whose settings could be shown; run: treadle compile {source} --print-config")
    from treadle.server.compile_first import compile_first

    return compile_first(source, level)


def _of(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """What of the given settings belongs to `config`."""
    return {field.name: given[field.name] for field in dataclasses.fields(config) if field.name in given}


def _some(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value}


def _log_settings(*resolved: Resolved[Any]) -> None:
    """Logs each effective setting with where it came from; secrets are starred."""
    for part in resolved:
        rows = ", ".join(_setting(row) for row in part.rows())
        logger.info("%s: %s", type(part.config).__name__, rows)


def _setting(row: Mapping[str, Any]) -> str:
    return f"{row['field']}={row['value']} ({row['source']})"
