"""`treadle chat`: a conversation in this process, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from msgspec.structs import replace

from treadle.ir.errors import UserError
from treadle.server.commands_generate import chosen

app = typer.Typer(add_completion=False)


@app.command(help="Chat with a bundle or a model; an empty line or the end of input ends the conversation.")
def chat(
    source: Annotated[str, typer.Argument(metavar="BUNDLE_OR_MODEL", help="A bundle, or a model to compile first.")],
    message: Annotated[
        list[str] | None, typer.Option("--message", "-m", help="Say this and end; may be repeated for several turns.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of each answer.")] = 256,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes drawn answers repeatable.")] = None,
) -> None:
    """Prints each answer; the history grows with each turn."""
    from treadle import LLM

    asked = chosen(max_tokens=max_tokens, temperature=temperature, seed=seed)
    llm = LLM(source)
    params = replace(llm.get_default_sampling_params(), **asked)
    history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for text in message or _typed():
        history.append({"role": "user", "content": text})
        try:
            answer = llm.chat(history, params)[0].outputs[0].text
        except UserError as error:
            if message:
                raise
            typer.echo(f"treadle: {error}", err=True)
            history.pop()
            continue
        typer.echo(answer)
        history.append({"role": "assistant", "content": answer})


def _typed() -> Iterator[str]:
    """The lines a person types, until an empty one."""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if not line.strip():
            return
        yield line
