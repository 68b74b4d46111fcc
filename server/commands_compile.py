"""`treadle compile`: makes a bundle and shows each stage with its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from treadle.codegen.progress import Progress
from treadle.server.environment import store_root

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class ShownProgress(Progress):
    """One line for each stage that has ended, and a moving one for what is under way; plain lines without a terminal."""

    def __init__(self, console: Console, status: Status):
        self._console = console
        self._status = status
        self._stage = ""

    def begin(self, stage: str) -> None:
        self._stage = stage
        self._show(stage)

    def end(self, stage: str, seconds: float) -> None:
        self._console.print(f"{stage:<16}{seconds:8.1f} s", highlight=False)

    def piece(self, number: int, total: int, label: str) -> None:
        self._show(f"compile piece {number} of {total} ({label})")

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", style="yellow", highlight=False, soft_wrap=True)

    def _show(self, doing: str) -> None:
        if self._console.is_terminal:
            self._status.update(doing)
        else:
            self._console.print(f"{doing} ...", highlight=False)


@contextmanager
def _showing() -> Iterator[ShownProgress]:
    console = Console(stderr=True)
    status = console.status("starting")
    with status:
        yield ShownProgress(console, status)


@app.command()
def compile(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file or the alias smollm2.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the bundle; default NAME.bundle.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (default: the model's own), float32, bfloat16 or float16.")] = None,
    target: Annotated[str | None, typer.Option(help="cpu (default: this machine) or, for example, cpu:x86-64-avx2.")] = None,
    level: Annotated[
        int | None,
        typer.Option("-O", help="Optimization level: 0 no compiling and no graphs, 1 piecewise graphs, 2 full graphs and fusions (default), 3 measured."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show what was asked for, defaults and effective settings, and end.")
    ] = False,
    backend: Annotated[str | None, typer.Option(help="inductor, eager or tvm; default what the level says.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest request in tokens, prompt and answer.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in one step.")] = None,
    fuse_norm_quant: Annotated[
        bool | None, typer.Option("--fuse-norm-quant/--no-fuse-norm-quant", help="Join norms and quantization (default: from level 2).")
    ] = None,
    fuse_act_quant: Annotated[
        bool | None, typer.Option("--fuse-act-quant/--no-fuse-act-quant", help="Join activations and quantization (default: from level 2).")
    ] = None,
    fuse_all_reduce_norm: Annotated[
        bool | None, typer.Option("--fuse-all-reduce-norm/--no-fuse-all-reduce-norm", help="Join sums over ranks and norms (default: from level 2).")
    ] = None,
    exact_size: Annotated[list[int] | None, typer.Option(help="A token count that gets its own artifact; repeatable.")] = None,
    disable_pass: Annotated[list[str] | None, typer.Option(help="A pass to leave out; repeatable.")] = None,
    extra_pass: Annotated[
        list[str] | None, typer.Option("--pass", help="A pass to add, as NAME or 'NAME{opt=1}'; repeatable. See `treadle passes`.")
    ] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="Ranks to cut the model over; default 1.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="int8, int8_weight_only, fp8, fp8_weight_only, or a plugin's scheme.")
    ] = None,
    store_weights: Annotated[
        bool | None, typer.Option("--store-weights/--no-store-weights", help="Write the transformed weights into the bundle (default: yes).")
    ] = None,
    sign: Annotated[Path | None, typer.Option(help="ed25519 private key (PEM) to sign the manifest with.")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace a bundle that is already there.")] = False,
    store: Annotated[Path | None, typer.Option(help="The artifact store; default TREADLE_STORE or the user's cache.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Compile this many pieces at once; default one for each core.")] = None,
    compiler: Annotated[str | None, typer.Option(help="The C++ compiler; default g++.")] = None,
) -> None:
    """Compile a model ahead of time and write a bundle."""
    from treadle.codegen.compile import compile as compile_model

    asked: dict[str, Any] = {
        "dtype": dtype,
        "target": target,
        "level": level,
        "backend": backend,
        "fuse_norm_quant": fuse_norm_quant,
        "fuse_act_quant": fuse_act_quant,
        "fuse_all_reduce_norm": fuse_all_reduce_norm,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "exact_sizes": tuple(exact_size) if exact_size else None,
        "disabled_passes": tuple(disable_pass) if disable_pass else None,
        "extra_passes": tuple(extra_pass) if extra_pass else None,
        "tensor_parallel_size": tensor_parallel_size,
        "quantization": quantization,
        "store_weights": store_weights,
        "sign": str(sign) if sign else None,
        "force": force or None,
        "jobs": jobs,
        "compiler": compiler,
    }
    settings = {name: value for name, value in asked.items() if value is not None}
    if print_config:
        from treadle.codegen.compile import settle_settings
        from treadle.server.config_text import config_text

        typer.echo(config_text(settle_settings(model, **settings)))
        return
    with _showing() as progress:
        bundle = compile_model(model, output, store=store or store_root(), progress=progress, **settings)
    typer.echo(str(bundle))
