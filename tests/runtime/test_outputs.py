"""The objects that generations come back as."""

from __future__ import annotations

from treadle.runtime.outputs import CompletionOutput, Logprob, RequestOutput, logprob_entries
from treadle.runtime.protocol import LogprobRow


def output(text: str, ids: list[int], index: int = 0, reason: str | None = None) -> RequestOutput:
    logprobs = [{i: Logprob(-1.0)} for i in ids]
    completion = CompletionOutput(index, text, ids, -1.0 * len(ids), logprobs, finish_reason=reason)
    return RequestOutput("r", "p", [1], outputs=[completion], finished=reason is not None)


def test_attribute_names() -> None:
    """The names are vLLM's."""
    result = output("hi", [4], reason="stop")
    first = result.outputs[0]
    assert (result.request_id, result.prompt, result.prompt_token_ids, result.finished) == (
        "r",
        "p",
        [1],
        True,
    )
    assert (first.index, first.text, first.token_ids, first.finish_reason) == (0, "hi", [4], "stop")
    assert first.stop_reason is None and first.cumulative_logprob == -1.0 and first.finished()
    assert result.prompt_logprobs is None and result.metrics is None and result.num_cached_tokens is None


def test_deltas_add_up() -> None:
    """A consumer that fell behind reads the same text, ids and logprobs in fewer outputs."""
    total = output("he", [1, 2])
    ids = total.outputs[0].token_ids
    total.add(output("llo", [3], reason="length"), aggregate=True)
    total.add(output("x", [9], index=1), aggregate=True)
    first, second = total.outputs
    assert (first.text, first.token_ids, first.finish_reason) == ("hello", [1, 2, 3], "length")
    assert first.logprobs is not None and [next(iter(entry)) for entry in first.logprobs] == [1, 2, 3]
    assert second.index == 1 and second.text == "x" and total.finished and ids == [1, 2]


def test_cumulative_outputs_replace() -> None:
    total = output("he", [1, 2])
    total.add(output("hello", [1, 2, 3]), aggregate=False)
    assert total.outputs[0].text == "hello" and len(total.outputs) == 1


def test_logprob_entries_keep_order_and_first_rank() -> None:
    """C06-02: the sampled token comes first and once."""
    row = LogprobRow([5, 5, 3], [-0.5, -0.5, -2.0], [1, 1, 2])
    assert list(logprob_entries(row, str).items()) == [(5, Logprob(-0.5, 1, "5")), (3, Logprob(-2.0, 2, "3"))]
    assert logprob_entries(row)[3].decoded_token is None
