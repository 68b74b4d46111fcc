"""`treadle bench`: measures and reports, with what is needed to run it again. Each measurement is in `server/bench/`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from treadle.codegen.bundle import open_bundle
from treadle.codegen.manifest import Manifest
from treadle.ir.errors import ConfigError
from treadle.runtime.levels import bundle_level
from treadle.server.bench.report import check_writable, make_report, write_report
from treadle.server.environment import take_api_keys
from treadle.server.setting_pairs import parse_settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

Source = Annotated[str, typer.Argument(metavar="BUNDLE", help="A bundle.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the results here as JSON.")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="New tokens of a request.")]
Warmup = Annotated[int, typer.Option(min=0, help="Repeats that are not counted.")]
Repeats = Annotated[int, typer.Option(min=1, help="Repeats that are counted.")]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads; default the processors allowed to us.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of another engine setting; repeatable.")]


@app.callback()
def _group() -> None:
    """Measure a bundle, a start, a compile, or any OpenAI-compatible server."""


@app.command()
def latency(
    bundle: Source,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 1,
    warmup: Warmup = 2,
    repeats: Repeats = 10,
    seed: Seed = 0,
    num_threads: Threads = None,
    setting: Settings = None,
    output: Output = None,
) -> None:
    """Time one batch from its prompts to its last token, over and over, in this process."""
    load = {"num_prompts": batch_size, "spread": 0.0}
    load |= {"input_len": input_len, "output_len": output_len, "warmup": warmup, "repeats": repeats, "seed": seed}
    _offline("latency", bundle, load, num_threads, setting, output)


@app.command()
def throughput(
    bundle: Source,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests given to the engine at once.")] = 32,
    spread: Annotated[float, typer.Option(min=0, max=1, help="Draw lengths from 1 - SPREAD to 1 + SPREAD times those given.")] = 0.0,
    warmup: Warmup = 1,
    repeats: Repeats = 5,
    seed: Seed = 0,
    num_threads: Threads = None,
    setting: Settings = None,
    output: Output = None,
) -> None:
    """Count tokens per second of many requests given at once, in this process."""
    load = {"num_prompts": num_prompts, "spread": spread}
    load |= {"input_len": input_len, "output_len": output_len, "warmup": warmup, "repeats": repeats, "seed": seed}
    _offline("throughput", bundle, load, num_threads, setting, output)


@app.command()
def startup(
    bundle: Source,
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each kind.")] = 5,
    kind: Annotated[list[str] | None, typer.Option(help="llm or serve; repeatable; default both.")] = None,
    output: Output = None,
) -> None:
    """Time a start from process to first token, phase by phase, beside what importing torch and transformers takes.

    Every reading is of a new process, the kinds in turn. `llm` makes a `treadle.LLM`, `serve` is a whole server.
    """
    from treadle.server.bench.startup import KINDS, measure_startup, startup_lines

    check_writable(output)
    kinds = list(dict.fromkeys(kind or KINDS))
    if unknown := [name for name in kinds if name not in KINDS]:
        raise ConfigError(f"--kind {unknown[0]!r} is not one of: {', '.join(KINDS)}")
    manifest = open_bundle(bundle, for_loading=False).manifest
    results = measure_startup(bundle, repeats, kinds)
    settings = {"repeats": repeats, "kinds": kinds}
    _show(make_report("startup", settings, results, model=_model(manifest)), startup_lines(results), output)


@app.command("compile")
def compile_(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file or the alias smollm2.")],
    warm: Annotated[bool, typer.Option("--warm/--no-warm", help="Compile once more, from the store that the first time filled.")] = True,
    setting: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of a compile setting; repeatable.")] = None,
    output: Output = None,
) -> None:
    """Time a compile by stages with an empty store, in a temporary folder that is removed afterwards."""
    from treadle.codegen.compile import settle_settings
    from treadle.server.bench.compiling import compile_lines, measure_compile

    check_writable(output)
    settings = parse_settings(setting or [])
    config = settle_settings(model, **settings).rows()
    results = measure_compile(model, settings, warm=warm)
    effective = {row["field"]: row["value"] for row in config}
    report = make_report("compile", {"model": Path(model).name, "warm": warm} | settings, results, effective=effective)
    _show(report, compile_lines(results), output)


@app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="The server, such as http://127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Option(help="The model's name; default the first that the server lists.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat, streamed.")] = "completions",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests that are counted.")] = 100,
    request_rate: Annotated[float | None, typer.Option(help="Open loop: requests per second; inf sends all at once.")] = None,
    arrival: Annotated[str, typer.Option(help="Open loop: poisson, constant or burst.")] = "poisson",
    burst_size: Annotated[int, typer.Option(min=1, help="Requests of one burst, with --arrival burst.")] = 8,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: requests under way at once.")] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Common words of a prompt, about a token each; the server's count is reported.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Most new tokens of a request.")] = 128,
    spread: Annotated[float, typer.Option(min=0, max=1, help="Draw lengths from 1 - SPREAD to 1 + SPREAD times those given.")] = 0.0,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Words that every prompt begins with, besides its own.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of full length.")] = True,
    extra: Annotated[list[str] | None, typer.Option("--extra", help="NAME=VALUE of another field of each request; repeatable.")] = None,
    goodput: Annotated[list[str] | None, typer.Option(help="Limits in ms, such as 'ttft:200 tpot:50'; also e2e; repeatable.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, that are not counted.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds one request may take.")] = 600.0,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the spread of latencies into this .svg file.")] = None,
    output: Output = None,
) -> None:
    """Load any OpenAI-compatible server and time its streams, from the moment each request was due.

    Give --request-rate (open loop) or --concurrency (closed loop). A key is read from TREADLE_API_KEY. The report says
    what the client itself adds, measured in the same run against a server that computes nothing.
    """
    from treadle.server.bench.load import Address, ServeLoad, parse_limits
    from treadle.server.bench.plot import plot_svg
    from treadle.server.bench.serving import first_model, measure_serve, serve_lines

    check_writable(output, plot)
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot {plot} should end in .svg, the one format that is drawn")
    load = ServeLoad(
        num_prompts=num_prompts, request_rate=request_rate, concurrency=concurrency, arrival=arrival, burst_size=burst_size,
        input_len=input_len, output_len=output_len, spread=spread, shared_prefix=shared_prefix, endpoint=endpoint,
        ignore_eos=ignore_eos, extra_body=parse_settings(extra or [], "--extra"), seed=seed,
    )  # fmt: skip
    address, limits = Address.parse(base_url), parse_limits(goodput or [])
    api_key = next(iter(take_api_keys()), None)
    name = model or first_model(address, api_key)
    results, timed = measure_serve(address, name, load, warmup=warmup, timeout=timeout, limits=limits, api_key=api_key)
    settings = dataclasses.asdict(load) | {"warmup": warmup, "timeout": timeout, "request_rate": request_rate and str(request_rate)}
    _show(make_report("serve", settings, results, server={"base_url": address.url(""), "model": name}), serve_lines(results), output)
    if plot is not None:
        plot.write_text(plot_svg(timed, f"{name}, {num_prompts} requests"))


def _offline(
    name: str, bundle: str, load: dict[str, Any], num_threads: int | None, setting: list[str] | None, output: Path | None
) -> None:
    from treadle.server.bench.offline import OfflineLoad, measure_offline
    from treadle.server.bench.tables import offline_lines

    check_writable(output)
    engine = parse_settings(setting or []) | ({"num_threads": num_threads} if num_threads else {})
    results, config = measure_offline(bundle, engine, OfflineLoad(**load))
    _show(make_report(name, load, results, effective=config), offline_lines(results), output)


def _show(report: dict[str, Any], lines: list[str], output: Path | None) -> None:
    """Prints the machine and the lines; writes the report where asked."""
    machine = report["hardware"]
    loads = ", ".join(map(str, machine["load_average"]))
    typer.echo(f"{machine['processor']}, {machine['usable_processors']} processors, load {loads}")
    for line in lines:
        typer.echo(line)
    write_report(report, output)


def _model(manifest: Manifest) -> dict[str, Any]:
    """What a bundle holds, as far as numbers depend on it."""
    model, target = manifest.model, manifest.target
    return {"name": model.name, "architecture": model.architecture, "dtype": model.dtype, "level": bundle_level(manifest)} | {
        "target": msgspec.to_builtins(target)
    }
