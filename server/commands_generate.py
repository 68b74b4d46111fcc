"""`treadle generate`: completes prompts in this process, without a server."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from treadle.runtime.sampling_params import SamplingParams

app = typer.Typer(add_completion=False)


@app.command(help="Complete prompts from a bundle or a model; without --prompt, standard input is the prompt.")
def generate(
    source: Annotated[str, typer.Argument(metavar="BUNDLE_OR_MODEL", help="A bundle, or a model to compile first.")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of each answer.")] = 128,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Draw from the likeliest tokens that hold this share.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Draw from this many likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes drawn answers repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends an answer; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")] = False,
) -> None:
    """Prints each answer, or a JSON object for each prompt."""
    from treadle import LLM

    asked = chosen(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop)
    prompts = prompt or [sys.stdin.read().removesuffix("\n")]
    llm = LLM(source)
    params = replace(llm.get_default_sampling_params(), **asked)
    for output in llm.generate(prompts, params):
        answer = output.outputs[0]
        if as_json:
            found = {"prompt": output.prompt, "text": answer.text, "finish_reason": answer.finish_reason}
            typer.echo(json.dumps({**found, "token_ids": list(answer.token_ids)}, ensure_ascii=False))
        else:
            typer.echo(answer.text)


def chosen(**asked: Any) -> dict[str, Any]:
    """The sampling parameters that were given, checked before a model is loaded for them."""
    given = {name: value for name, value in asked.items() if value is not None}
    SamplingParams(**given)
    return given
