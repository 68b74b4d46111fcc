"""Every backend holds constraints exactly: masks, acceptance, rollback, ends and refusals are the same questions to each."""

from __future__ import annotations

import json
import random
import re
import sys
import time

import numpy as np
import pytest

from tests.runtime.structured.conftest import TIMEOUT, tiny_renderer, tiny_vocabulary
from treadle.runtime.structured.constraint import (
    Constraint,
    GrammarError,
    GrammarTimeout,
    StructuredOutputsParams,
)
from treadle.runtime.structured.interface import Backend, Grammar

EOS = 2
WORDS = tiny_vocabulary().num_words


def ids(text: str) -> list[int]:
    return tiny_renderer().encode(text)


def allowed(grammar: Grammar) -> set[int]:
    mask = np.full((2, WORDS), -1, dtype=np.int32)
    grammar.fill_bitmask(mask, 1)
    assert (mask[0] == -1).all(), "another row was written to"
    bits = np.unpackbits(mask.view(np.uint8)[1], count=len(tiny_vocabulary().tokens), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def started(backend: Backend, **params: object) -> Grammar:
    return backend.compile(StructuredOutputsParams(**params).constraint).start()


def walk(grammar: Grammar, seed: int, limit: int = 400) -> str:
    """The text of a random walk through the masks, to the end."""
    rng, tokens = random.Random(seed), []
    while not grammar.terminated:
        token = rng.choice(sorted(allowed(grammar)))
        assert grammar.accept_tokens([token])
        tokens.append(token)
        assert len(tokens) < limit, tiny_renderer().decode(tokens)
    assert tokens[-1] == EOS
    return tiny_renderer().decode(tokens[:-1])


@pytest.mark.parametrize("pattern", [r"a{2,3}", r"\d{3}-\d{4}", r"(yes|no)( please)?", r"[^a-z]{1,4}", "\u65e5[\u0e01\U0001f99c]{2}"])
def test_masks_of_a_regex_are_exact(backend: Backend, pattern: str) -> None:
    """C06-10: a token is allowed exactly if some text of the language goes on with it; the end only where one may end."""
    for seed in range(6):
        assert re.fullmatch(pattern, walk(started(backend, regex=pattern), seed))
    grammar = started(backend, regex="ab|ac")
    tokens = tiny_vocabulary().tokens
    assert {tokens[token] for token in allowed(grammar)} == {t for t in tokens if t and (b"ab".startswith(t) or b"ac".startswith(t))}
    assert grammar.accept_tokens(ids("a")) and {tokens[t] for t in allowed(grammar)} == {b"b", b"c"}
    assert grammar.accept_tokens(ids("c")) and allowed(grammar) == {EOS} and not grammar.terminated
    assert grammar.accept_tokens([EOS]) and grammar.terminated


def test_kinds_of_constraints(backend: Backend) -> None:
    """C06-10: choice, grammar, JSON object and schema, compact or with whitespace."""
    choice = ["yes", 'n"o\\', "line\nbreak", "\U0001f99c"]
    assert {walk(started(backend, choice=choice), seed) for seed in range(24)} == set(choice)
    grammar = 'root ::= "(" root ")" | [0-9]{1,2}'
    for seed in range(6):
        text = walk(started(backend, grammar=grammar), seed)
        inner = text.strip("()")
        assert inner.isdigit() and text == "(" * text.count("(") + inner + ")" * text.count("(")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    texts = [walk(started(backend, json=schema, disable_any_whitespace=True), seed) for seed in range(6)]
    assert all(text == json.dumps(json.loads(text), separators=(",", ":")) for text in texts)
    spaced = [walk(started(backend, json=schema), seed) for seed in range(20)]
    assert any(" " in text or "\n" in text for text in spaced) and not any("   " in text for text in spaced)
    assert all(set(json.loads(text)) == {"a", "b"} for text in (*texts, *spaced))
    anything = started(backend, json_object=True)
    assert anything.accept_tokens(ids('{"any": [1, {"x": null}], "\u65e5": "z"}')) and EOS in allowed(anything)
    assert ids("[")[0] not in allowed(started(backend, json_object=True))


def test_schemas_name_all_properties_of_an_object(backend: Backend) -> None:
    """Without additionalProperties an object has what its schema names, with it set also others."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    closed = started(backend, json=schema, disable_any_whitespace=True)
    assert closed.validate_tokens(ids('{"a":1,"b":2}')) == ids('{"a":1') and closed.accept_tokens([*ids('{"a":1}'), EOS])
    opened = started(backend, json={**schema, "additionalProperties": {"type": "integer"}}, disable_any_whitespace=True)
    assert opened.accept_tokens([*ids('{"a":1,"b":2}'), EOS])


def test_accept_validate_and_rollback(backend: Backend) -> None:
    """C06-14: acceptance is all or nothing, validation gives the longest prefix and moves nothing, rollback undoes."""
    grammar = started(backend, regex="abc(de)?")
    assert grammar.validate_tokens(ids("abx")) == ids("ab") == grammar.validate_tokens(ids("abx"))
    before = allowed(grammar)
    assert not grammar.accept_tokens(ids("abx")) and allowed(grammar) == before
    assert not grammar.accept_tokens([EOS]) and grammar.validate_tokens([EOS]) == []
    assert grammar.validate_tokens([*ids("abc"), EOS, *ids("a")]) == [*ids("abc"), EOS]
    assert grammar.accept_tokens([*ids("abc"), EOS]) and grammar.terminated
    assert grammar.validate_tokens([EOS]) == [] and not grammar.accept_tokens([EOS])
    grammar.rollback(2)
    assert not grammar.terminated and grammar.accept_tokens(ids("cde")) and allowed(grammar) == {EOS}
    grammar.rollback(5)
    assert allowed(grammar) == before
    grammar.rollback(0)
    assert allowed(grammar) == before


def test_special_tokens_and_padding_are_never_text(backend: Backend) -> None:
    """A text may spell a special token; the token itself, and ids beyond the tokenizer, are not allowed in it."""
    grammar = started(backend, regex="(.|\n){0,20}")
    known = tiny_renderer().vocab_size
    assert known < len(tiny_vocabulary().tokens), "the model's head is wider than its tokenizer"
    assert allowed(grammar) & {0, 1, 2} == {EOS} and max(allowed(grammar)) < known
    assert grammar.accept_tokens(ids("<") + ids("|") + ids("im"))


def test_requests_with_one_grammar_do_not_share_a_state(backend: Backend) -> None:
    compiled = backend.compile(Constraint("regex", "ab"))
    first, second = compiled.start(), compiled.start()
    assert first.accept_tokens(ids("a")) and second.accept_tokens(ids("ab")) and compiled.num_bytes > 0
    assert allowed(first) == set(ids("b")) and allowed(second) == {EOS}


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(", "paren|unclosed"),
        ("regex", "[a-", r"\["),
        ("grammar", "root ::= foo", "foo"),
        ("json", '{"type": "fruit"}', "fruit"),
        ("json", '{"$ref": "#/$defs/none"}', "none"),
        ("structural_tag", '{"format": {"type": "unheard_of"}}', "unheard_of"),
        ("structural_tag", '{"structures": [], "triggers": ["a"]}', "structures"),
    ],
)
def test_what_does_not_compile_is_refused_in_the_compilers_words(backend: Backend, kind: str, source: str, words: str) -> None:
    with pytest.raises(GrammarError, match=rf"(?i)structured_outputs: .*({words})"):
        constraint = Constraint(kind, source)
        if reason := backend.unsupported_reason(constraint):
            raise GrammarError(reason)
        backend.compile(constraint)


@pytest.mark.parametrize("source", ["(.*.*.*){1,200}x", "(.|..|...|....){1,300}", "((.?){1,40}){1,40}", "(" + "|".join("a" * i for i in range(1, 900)) + ")*"])
def test_a_regex_that_explodes_ends_in_time(backend: Backend, source: str) -> None:
    """C06-10: it is refused within the time limit, or it compiles and each of its steps is fast."""
    start = time.monotonic()
    try:
        grammar = backend.compile(Constraint("regex", source)).start()
    except GrammarError:
        assert time.monotonic() - start < TIMEOUT + 2
        return
    for token in ids("aaaa bbbb aaaa"):
        start = time.process_time()
        try:
            if not grammar.accept_tokens([token]):
                break
            allowed(grammar)
        except RuntimeError:  # out of fuel: the request ends, quickly
            break
        finally:
            assert time.process_time() - start < 1.0


def test_a_message_tells_where_the_time_went(name: str, backend: Backend) -> None:
    if name != "xgrammar":
        pytest.skip("compiles as it goes")
    with pytest.raises(GrammarTimeout, match=r"took longer than 3 s \(structured_output_timeout\).*simplify|repetitions in it overlap; simplify"):
        backend.compile(Constraint("regex", "((.?){1,60}){1,60}"))
    assert backend.compile(Constraint("regex", "ok")).start().accept_tokens(ids("ok")), "the next one compiles"


TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}, "end": "</f>"}],
    "triggers": ["<f>"],
}


def test_structural_tags(backend: Backend) -> None:
    """C06-10: text is free until a trigger; then the schema holds up to the end mark."""
    grammar = started(backend, structural_tag=TAG, disable_any_whitespace=True)
    assert grammar.accept_tokens(ids("a fox <f>")) and EOS not in allowed(grammar)
    assert grammar.validate_tokens(ids("fox")) == []
    rest = ids('{"x":1}</f>')
    if grammar.validate_tokens(rest) != rest:
        rest = ids('{"x": 1}</f>')
    assert grammar.accept_tokens(rest)
    assert EOS in allowed(grammar) and grammar.accept_tokens([*ids(" more"), EOS])


def test_no_library_is_imported_with_the_table() -> None:
    """C06-10: choosing and naming backends imports none of them."""
    import subprocess

    code = (
        "import sys; import treadle, treadle.runtime.engine.core, treadle.runtime.structured.manager\n"
        "from treadle.runtime.structured.backends import STRUCTURED_BACKENDS as B\n"
        "[B.get(name) for name in ('xgrammar', 'llguidance')]\n"
        "print([m for m in ('xgrammar', 'llguidance', 'transformers', 'jsonschema') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
