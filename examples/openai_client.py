"""Streams an answer from `treadle serve` with OpenAI's own client: `python examples/openai_client.py [URL] [KEY]`."""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000/v1", key: str = "none") -> None:
    """Prints the pieces of one answer as they come."""
    client = OpenAI(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name three rivers of France."}]
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=64, stream=True)  # type: ignore
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:3])
