import pytest

from tests.runtime.fake_runner import make_request
from treadle.runtime.request import BLOCKED, FinishReason, RequestStatus

PATHS = {
    RequestStatus.WAITING: [],
    RequestStatus.WAITING_FOR_GRAMMAR: [RequestStatus.WAITING_FOR_GRAMMAR],
    RequestStatus.WAITING_FOR_REMOTE_KV: [RequestStatus.WAITING_FOR_REMOTE_KV],
    RequestStatus.RUNNING: [RequestStatus.RUNNING],
    RequestStatus.PREEMPTED: [RequestStatus.RUNNING, RequestStatus.PREEMPTED],
}


@pytest.mark.parametrize("status", PATHS)
def test_ends_from_every_status(status):
    """C01-01: abort is a legal transition from every live status, and FINISHED is final."""
    request = make_request("a", [1, 2])
    for step in PATHS[status]:
        request.status = step
    assert request.status is status
    request.finish(FinishReason.ABORT)
    assert request.is_finished and request.finish_reason == "abort"
    for after in RequestStatus:
        with pytest.raises(AssertionError):
            request.status = after


@pytest.mark.parametrize("status", sorted(BLOCKED, key=str))
def test_blocked_request_does_not_run(status):
    """C01-01: a request that waits for something outside cannot start running."""
    request = make_request("a", [1, 2])
    request.status = status
    assert request.is_blocked
    with pytest.raises(AssertionError):
        request.status = RequestStatus.RUNNING


def test_token_lists_agree_and_are_read_only():
    """C01-02: both lists grow in one operation; consumers cannot change them."""
    request = make_request("a", [1, 2, 3])
    for token in (7, 8):
        request.append_output(token)
    assert list(request.all_token_ids) == [*request.prompt_token_ids, *request.output_token_ids] == [1, 2, 3, 7, 8]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
    for view in (request.prompt_token_ids, request.output_token_ids, request.all_token_ids):
        with pytest.raises(TypeError):
            view[0] = 9  # type: ignore[index]
        assert not hasattr(view, "append")


def test_progress_counts_drafts():
    """C01-02: progress is computed tokens against known tokens and drafts, nothing else."""
    request = make_request("a", [1, 2, 3])
    request.spec_token_ids = [4, 5]
    assert request.num_tokens == 3 and request.num_tokens_with_spec == 5


def test_hashes_follow_tokens_incrementally():
    """C01-04: each call of the hasher sees where the hashes end; earlier ones are never computed again."""
    starts = []

    def hasher(request):
        starts.append(len(request.block_hashes))
        return [b"h"] * (request.num_tokens // 2 - len(request.block_hashes))

    request = make_request("a", [1, 2, 3])
    request.attach_hasher(hasher)
    assert request.block_hashes == [b"h"]
    request.append_output(4)
    request.append_output(5)
    assert request.block_hashes == [b"h"] * 2 and starts == [0, 1, 2]


def test_preemption_forgets_progress_and_keeps_tokens():
    """C01-03: what is in flight at a preemption becomes stale; all other counters start anew."""
    request = make_request("a", [1, 2, 3])
    request.append_output(4)
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens, request.spec_token_ids = 4, [5]
    request.num_output_placeholders = request.num_in_flight_tokens = 2
    request.preempt()
    assert (request.num_computed_tokens, request.num_output_placeholders, request.num_in_flight_tokens) == (0, 0, 0)
    assert request.spec_token_ids == [] and request.num_stale_output_tokens == 2
    assert list(request.all_token_ids) == [1, 2, 3, 4]
    assert request.is_blocked, "must not run before its stale outputs are back"


def test_dropped_stale_outputs_do_not_block():
    """C01-03: with nothing to wait for, a preempted request may run at once; a later preemption does not undo it."""
    request = make_request("a", [1])
    request.status = RequestStatus.RUNNING
    request.num_in_flight_tokens = 1
    request.preempt(drop_stale_output=True)
    assert request.drop_stale_output and not request.is_blocked
    request.status = RequestStatus.RUNNING
    request.preempt()
    assert request.drop_stale_output


@pytest.mark.parametrize(("max_tokens", "total"), [(5, 8), (100, 16), (None, 16)])
def test_longest_length(max_tokens, total):
    """TRAP-07: the limit counts prompt and output together; without max_tokens it is the model's."""
    assert make_request("a", [1, 2, 3], max_tokens).max_total_tokens(16) == total


def test_prompt_logprobs_come_once_and_complete():
    """C01-01: rows gather over chunks; a recomputed prompt reports nothing again."""
    request = make_request("a", [1, 2, 3], prompt_logprobs=1)
    assert not request.reads_prefix_cache
    request.add_prompt_logprobs([None])
    request.add_prompt_logprobs([None, None])
    assert request.take_prompt_logprobs() == [None] * 3
    request.add_prompt_logprobs([None])
    assert request.take_prompt_logprobs() is None and request.reads_prefix_cache
