"""Constrained requests in a whole engine on a toy model: what they give, and what becomes of those beside them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from tests.runtime.structured.conftest import BACKENDS, MakeLLM, made_backend, tiny_renderer, tiny_vocabulary
from tests.schemas import seeded_schema
from treadle import SamplingParams, StructuredOutputsParams
from treadle.ir.errors import TreadleError, UserError
from treadle.runtime.chat.reasoning import OpenReasoning
from treadle.runtime.engine import core as core_module
from treadle.runtime.engine.core import EngineCore
from treadle.runtime.engine.llm import LLM
from treadle.runtime.outputs import CompletionOutput
from treadle.runtime.protocol import CoreOutput, CoreRequest
from treadle.runtime.request import RequestStatus
from treadle.runtime.structured.backends import STRUCTURED_BACKENDS

EOS = 2
PROMPT = [40, 41, 42]
ABC = {"type": "object", "properties": {"a": {"enum": ["x", "yy", "zzz"]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}


def params(*, seed: int = 0, temperature: float = 1.0, max_tokens: int = 200, **options: Any) -> SamplingParams:
    fields = StructuredOutputsParams.__struct_fields__
    constraint = {name: options.pop(name) for name in list(options) if name in fields}
    return SamplingParams(
        seed=seed, temperature=temperature, max_tokens=max_tokens, **options, structured_outputs=constraint or None
    )


def ask(llm: LLM, *each: SamplingParams, prompt: list[int] = PROMPT) -> list[CompletionOutput]:
    outputs = llm.generate([prompt] * len(each), list(each), use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def held_by(name: str, seeds: Iterable[int]) -> list[int]:
    """The seeds of the schemas that a backend does not decline."""
    if name == "auto":
        return list(seeds)
    reason = made_backend(name).unsupported_reason
    return [seed for seed in seeds if reason(StructuredOutputsParams(json=seeded_schema(seed)).constraint) is None]


def check_schemas(llm: LLM, seeds: list[int]) -> None:
    schemas = [seeded_schema(seed) for seed in seeds]
    answers = ask(llm, *(params(seed=seed, json=schema) for seed, schema in zip(seeds, schemas, strict=True)))
    for seed, schema, answer in zip(seeds, schemas, answers, strict=True):
        assert answer.finish_reason == "stop", (seed, answer.text)
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))


@pytest.mark.parametrize("name", BACKENDS)
def test_seeded_schemas_hold(make_llm: MakeLLM, name: str) -> None:
    """C06-09, C06-10: at temperature 1 every answer of a random model parses and fits its schema."""
    check_schemas(make_llm(structured_output_backend=name), held_by(name, range(30)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*BACKENDS, "auto"])
def test_200_seeded_schemas_hold(make_llm: MakeLLM, name: str) -> None:
    """C06-09: the same of 200 schemas."""
    seeds = held_by(name, range(200))
    assert len(seeds) > 140
    check_schemas(make_llm(structured_output_backend=name), seeds)


@pytest.mark.parametrize("name", BACKENDS)
def test_constrained_and_free_requests_share_steps(make_llm: MakeLLM, name: str) -> None:
    """C06-09: the free ones give what they give alone; every constraint holds beside the others, greedy and drawn."""
    llm = make_llm(structured_output_backend=name)
    free = [params(seed=seed, max_tokens=20) for seed in range(4)]
    alone = [answer.token_ids for answer in ask(llm, *free)]
    bound = [
        params(json=ABC),
        params(regex=r"\d{3}-\d{4}", temperature=0),
        params(choice=["left", "right"]),
        params(grammar='root ::= "<" [a-c]{2,4} ">"'),
        params(json_object=True, max_tokens=30),
    ]
    answers = ask(llm, *free, *bound)
    assert [answer.token_ids for answer in answers[:4]] == alone
    a, b, c, d, e = answers[4:]
    jsonschema.validate(json.loads(a.text), ABC)
    assert re.fullmatch(r"\d{3}-\d{4}", b.text) and c.text in ("left", "right") and re.fullmatch("<[a-c]{2,4}>", d.text)
    assert e.text.lstrip().startswith("{")
    assert all(answer.finish_reason == "stop" and answer.token_ids[-1] == EOS for answer in (a, b, c, d))


def test_n_and_seeds(make_llm: MakeLLM) -> None:
    """Each of n has a grammar of its own, and a seed gives the same answers alone and in company."""
    llm = make_llm()
    several = params(json=ABC, n=4, seed=9)
    first = [answer.text for answer in ask(llm, several)]
    again = [answer.text for answer in ask(llm, params(regex="[a-z]{9}"), several)][1:]
    assert first == again and len(set(first)) > 1
    for text in first:
        jsonschema.validate(json.loads(text), ABC)


def test_raw_logprobs_are_not_masked(make_llm: MakeLLM) -> None:
    """C06-02, C06-09: logprobs show what the model said, with the sampled token's true rank."""
    llm = make_llm()
    (free,) = ask(llm, params(temperature=0, max_tokens=1, logprobs=2))
    (bound,) = ask(llm, params(temperature=0, logprobs=2, choice=["zz"]))
    assert free.logprobs is not None and bound.logprobs is not None
    best = [token for token, entry in bound.logprobs[0].items() if entry.rank in (1, 2)]
    assert best == [token for token, entry in free.logprobs[0].items() if entry.rank in (1, 2)]
    chosen = bound.logprobs[0][bound.token_ids[0]]
    assert bound.text == "zz" and chosen.rank > 2 and chosen.logprob > -9999


@pytest.mark.parametrize("name", BACKENDS)
def test_the_end_of_the_grammar_is_the_end(make_llm: MakeLLM, name: str) -> None:
    """Whatever min_tokens, ignore_eos, allowed tokens and bad words say: where nothing else may follow, the answer ends."""
    llm = make_llm(structured_output_backend=name)
    (b,) = tiny_renderer().encode("b")
    for options in ({"min_tokens": 50}, {"ignore_eos": True}, {"allowed_token_ids": [b]}, {"bad_words": ["a"]}):
        (answer,) = ask(llm, params(regex="a{3}", **options))
        assert (answer.text, answer.finish_reason, answer.token_ids[-1]) == ("aaa", "stop", EOS), options
    (longer,) = ask(llm, params(regex="a{3,40}", min_tokens=30))
    assert len(longer.token_ids) >= 30 and set(longer.text) == {"a"}
    (only_b,) = ask(llm, params(regex="[abc]{5}", allowed_token_ids=[b]))
    assert only_b.text == "bbbbb"


def test_stops_and_limits_may_cut(make_llm: MakeLLM) -> None:
    """A stop string, a stop id or max_tokens ends an answer before its grammar does, with their own reasons."""
    llm = make_llm()
    (c,) = tiny_renderer().encode("c")
    cut = ask(
        llm,
        params(regex="abcdef", stop=["cd"]),
        params(regex="abcdef", stop_token_ids=[c]),
        params(regex="abcdef", max_tokens=4),
    )
    assert [(answer.text, answer.finish_reason) for answer in cut] == [("ab", "stop"), ("ab", "stop"), ("abcd", "length")]
    assert [answer.stop_reason for answer in cut] == ["cd", c, None]


def test_preemption_keeps_the_place_in_the_grammar(make_llm: MakeLLM) -> None:
    """Requests that lose their blocks and start over go on in their grammar where they were."""
    wanted = [params(seed=seed, regex="[a-f]{60}", n=2, max_tokens=64) for seed in range(4)]
    roomy = [answer.text for answer in ask(make_llm(), *wanted)]
    tight = make_llm(num_blocks=45, watermark=0.0, full_sequence_must_fit=False)
    assert [answer.text for answer in ask(tight, *wanted)] == roomy
    assert tight.stats().num_preemptions > 0 and all(re.fullmatch("[a-f]{60}", text) for text in roomy)


def test_a_refusal_names_the_keyword_and_hurts_nobody(make_llm: MakeLLM) -> None:
    """C06-10, TRAP-11: patterns that no grammar can hold; the engine serves the next request."""
    llm = make_llm()
    for pattern in ("[a-", "^(?!x).+$"):
        schema = {"type": "object", "properties": {"q": {"type": "string", "pattern": pattern}}}
        for _ in range(2):  # the second time from what is remembered
            with pytest.raises(UserError, match=r"prompt 0: .*'pattern' at \$\.properties\.q"):
                ask(llm, params(json=schema))
    with pytest.raises(UserError, match=r"'?not'? "):
        ask(llm, params(json={"not": {"type": "string"}}))
    assert ask(llm, params(choice=["fine"]))[0].text == "fine"


def test_auto_takes_the_first_backend_that_holds_a_schema_exactly(make_llm: MakeLLM) -> None:
    """C06-10: xgrammar would ignore multipleOf; llguidance holds it."""
    schema = {"type": "integer", "multipleOf": 7, "minimum": 20, "maximum": 90}
    answers = ask(make_llm(), *(params(seed=seed, json=schema) for seed in range(12)))
    assert all(int(answer.text) % 7 == 0 for answer in answers) and len({answer.text for answer in answers}) > 1
    with pytest.raises(UserError, match=r"xgrammar: keyword 'multipleOf' at \$"):
        ask(make_llm(structured_output_backend="xgrammar"), params(json=schema))


def test_limits_on_size_and_depth(make_llm: MakeLLM) -> None:
    llm = make_llm(structured_output_max_bytes=2000, structured_output_max_depth=20)
    with pytest.raises(UserError, match=r"the limit is 2000 bytes \(structured_output_max_bytes\)"):
        ask(llm, params(json={"enum": ["x" * 3000]}))
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(30):
        deep = {"items": deep}
    with pytest.raises(UserError, match=r"31 levels deep; the limit is 20 \(structured_output_max_depth\)"):
        ask(llm, params(json=deep))
    assert ask(llm, params(json={"type": "array", "items": {"type": "null"}}, max_tokens=3))


# The core, step by step


class Gate:
    """A backend whose compilations wait until they are let through; it knows the constraint `regex` "no" as an error."""

    package = "gate"

    def __init__(self, real: Any, open_now: bool = False):
        self.real, self.opened, self.count = real, threading.Event(), 0
        if open_now:
            self.opened.set()

    def __call__(self, *_: Any) -> Any:
        return self

    def unsupported_reason(self, _: Any) -> None:
        return None

    def compile(self, constraint: Any) -> Any:
        self.count += 1
        assert self.opened.wait(20)
        if constraint.source == "broken":
            raise KeyError("a bug in the library")
        return self.real.compile(constraint)

    def close(self) -> None:
        self.opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate(made_backend("llguidance"))
    monkeypatch.setitem(STRUCTURED_BACKENDS._targets, "gate", "nowhere:Gate")
    monkeypatch.setitem(STRUCTURED_BACKENDS._loaded, "gate", made)
    return made


def core_of(llm: LLM) -> EngineCore:
    assert llm._client is not None
    return llm._client.core


def add(core: EngineCore, req_id: str, sampling: SamplingParams) -> None:
    sampling.fill_eos([EOS])
    core.add_request(CoreRequest(request_id=req_id, prompt_token_ids=PROMPT, sampling_params=sampling, arrival_time=0.0))


def finish(core: EngineCore) -> dict[str, list[CoreOutput]]:
    found: dict[str, list[CoreOutput]] = {}
    for _ in range(5000):
        if not core.has_work:
            break
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append(output)
    core.check_integrity()
    assert not core.has_work and core.structured.num_waiting == 0
    return found


def text(outputs: list[CoreOutput]) -> str:
    return tiny_renderer().decode([token for output in outputs for token in output.new_token_ids], skip_special_tokens=True)


def test_others_go_on_while_a_grammar_compiles(make_llm: MakeLLM, gate: Gate) -> None:
    """C06-11, C03: the request waits in the skipped queue, one compilation serves two requests, and arrival order returns."""
    core = core_of(make_llm(structured_output_backend="gate"))
    add(core, "bound", params(regex="abc"))
    add(core, "twin", params(regex="abc"))
    add(core, "free", params(max_tokens=6, ignore_eos=True))
    waiting = core.scheduler.requests["bound"]
    outputs = [output for _ in range(8) for output in core.step().outputs]
    assert [output.request_id for output in outputs] == ["free"] * 6 and outputs[-1].finish_reason == "length"
    assert waiting.status is RequestStatus.WAITING_FOR_GRAMMAR and waiting in core.scheduler.skipped_waiting
    assert core.stats().num_waiting == 2
    gate.opened.set()
    found = finish(core)
    assert text(found["bound"]) == text(found["twin"]) == "abc" and gate.count == 1


def test_abort_while_waiting(make_llm: MakeLLM, gate: Gate) -> None:
    core = core_of(make_llm(structured_output_backend="gate"))
    add(core, "a", params(regex="abc"))
    core.step()
    (ended,) = core.abort(["a"])
    assert ended.finish_reason == "abort" and core.structured.num_waiting == 0
    gate.opened.set()
    assert finish(core) == {}
    add(core, "a", params(regex="abc"))
    assert text(finish(core)["a"]) == "abc"


def test_a_failing_compilation_ends_its_requests_only(make_llm: MakeLLM, gate: Gate) -> None:
    """C06-11: an error of the caller, and a bug of a library, each end the requests that wait for it."""
    core = core_of(make_llm(structured_output_backend="gate"))
    for req_id, source in (("user", "("), ("bug", "broken"), ("fine", "ok")):
        add(core, req_id, params(regex=source))
    gate.opened.set()
    found = finish(core)
    assert found["user"][-1].finish_reason == "error" and "unclosed group" in str(found["user"][-1].error)
    assert found["bug"][-1].finish_reason == "error" and "a bug in the library" in str(found["bug"][-1].error)
    assert text(found["fine"]) == "ok"


def test_a_taken_id_does_not_disturb_the_live_request(make_llm: MakeLLM, gate: Gate) -> None:
    core = core_of(make_llm(structured_output_backend="gate"))
    add(core, "a", params(regex="abc"))
    add(core, "a", params(regex="xyz"))
    (refused,) = core.step().outputs
    assert refused.finish_reason == "error" and "in use" in str(refused.error)
    gate.opened.set()
    assert text(finish(core)["a"]) == "abc"


def test_synchronous_compilation(make_llm: MakeLLM, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """C06-12: with externally launched ranks two engines that get the same requests schedule them in the same step."""
    from tests.runtime.toy_model import TextToyExecutor

    monkeypatch.setattr(TextToyExecutor, "externally_launched", True)
    gate.opened.set()
    cores = [core_of(make_llm(structured_output_backend="gate")) for _ in range(2)]
    for core in cores:
        add(core, "a", params(regex="abc"))
        assert core.scheduler.requests["a"].status is RequestStatus.WAITING
        assert [output.request_id for output in core.step().outputs] == ["a"]


def test_a_token_that_the_grammar_rejects_ends_the_request(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sampler's mask is lost on purpose: the request ends with an error and a log line, the engine goes on."""
    llm = make_llm()
    core = core_of(llm)
    monkeypatch.setattr(core.structured, "bitmask", lambda rows: None)
    with pytest.raises(TreadleError, match="the grammar does not allow token") as error:
        ask(llm, params(regex="zzzz", temperature=0))
    assert not isinstance(error.value, UserError) and "ends with an error: the grammar" in caplog.text
    monkeypatch.undo()
    assert len(ask(llm, params(max_tokens=5, ignore_eos=True))[0].token_ids) == 5
    core.check_integrity()


def test_reasoning_is_free_and_what_follows_is_held(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """C06-15: nothing is constrained before a section that the prompt opens has ended, unless that is asked for."""
    opening, closing, a, b = (tiny_renderer().encode(text)[0] for text in "()ab")
    vocabulary = replace(tiny_vocabulary(), reasoner=OpenReasoning(opening, closing))
    monkeypatch.setattr(core_module, "_vocabulary", lambda *_: vocabulary)
    wanted = params(regex="a{3}", allowed_token_ids=[a, b, closing], n=4)
    for prompt in ([*PROMPT, opening], PROMPT, [opening, *PROMPT, 43, 44], [*PROMPT, opening, 40, closing]):
        texts = [answer.text for answer in ask(make_llm(), wanted, prompt=prompt)]
        pattern = r"[ab]*\)aaa" if prompt[-1] == opening else "aaa"
        assert all(re.fullmatch(pattern, text) for text in texts), texts
        assert any("b" in text for text in texts) == (prompt[-1] == opening)
    everywhere = make_llm(structured_output_in_reasoning=True)
    assert {answer.text for answer in ask(everywhere, wanted, prompt=[*PROMPT, opening])} == {"aaa"}
