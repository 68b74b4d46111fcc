"""Completes two prompts and answers a chat from a bundle: `python examples/offline.py smollm2.bundle`."""

from __future__ import annotations

import sys

from treadle import LLM, SamplingParams


def main(bundle: str) -> None:
    """Prints the answers, then how many prompt tokens came from the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(bundle) as llm:
        for output in llm.generate(["The capital of France is", "The capital of Italy is"], params):
            print(repr(output.prompt), "->", repr(output.outputs[0].text))
        question = [{"role": "user", "content": "What is the capital of France?"}]
        for _ in range(2):
            answer = llm.chat(question, params)[0]
            print(repr(answer.outputs[0].text), "with", answer.num_cached_tokens, "cached prompt tokens")


if __name__ == "__main__":
    main(sys.argv[1])
