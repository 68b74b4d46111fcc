"""The renderer: Hugging Face templates, contents, tool calls, hostile texts, and the same ids as transformers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.server.tiny_tokenizer import SMOLLM2_TEMPLATE, tiny_tokenizer, write_tokenizer
from treadle.ir.errors import ModelError, UserError
from treadle.runtime.chat.messages import ChatError, repair_arguments
from treadle.runtime.chat.template import ChatTemplate
from treadle.runtime.renderer import PromptTooLong, Renderer

TOOL_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'banned' %}
        {{- raise_exception('role banned is not allowed') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<call>' + call.function.name + ' ' }}
            {{- call.function.arguments | tojson }}
            {{- '</call>' }}
        {%- endfor %}
    {%- endif %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
    {%- generation %}{{- '<|im_end|>\\n' }}{%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

PARTS_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}|{% endfor %}{% endfor %}"
)

EITHER_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}/{% endfor %}{% endif %}{% endfor %}"
)

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"x": "<a> & é"}}}


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return Renderer.load(write_tokenizer(tmp_path), max_model_len=256)


def with_template(template: str) -> Renderer:
    return Renderer(Tokenizer.from_str(tiny_tokenizer()), templates={"default": ChatTemplate(template)})


def user(content: object) -> list[dict]:
    return [{"role": "user", "content": content}]


def test_same_ids_as_transformers(tmp_path: Path, renderer: Renderer) -> None:
    """C02-16: text and ids of a chat are those of transformers for a string template and one with tools."""
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **special)
    chat = [{"role": "system", "content": "be <b> brief"}, *user("hé \U0001f99c?"), {"role": "assistant", "content": "ok"}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"q": "é"}}}
    with_call = [*chat, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for template, messages, tools in (
        (SMOLLM2_TEMPLATE, chat, None),
        (TOOL_TEMPLATE, with_call, [WEATHER]),
        (PARTS_TEMPLATE, user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), None),
    ):
        options = {"tools": tools, "add_generation_prompt": True}
        want = reference.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
        got = Renderer(renderer.tokenizer, templates={"default": ChatTemplate(template, special)}).render_chat(
            messages, **options
        )
        assert got.text == want
        assert got.token_ids == reference(want, add_special_tokens=False)["input_ids"]


def test_contents_normalise_for_each_format() -> None:
    """C02-06, TRAP-9: null is empty and never "None"; a list of one text is that text; formats are detected."""
    forms = {SMOLLM2_TEMPLATE: "string", PARTS_TEMPLATE: "openai", EITHER_TEMPLATE: "both"}
    for template, form in forms.items():
        renderer = with_template(template)
        assert renderer.chat_template().content_format == form
        parts = [{"type": "text", "text": "hello"}]
        assert renderer.render_chat(user(parts)) == renderer.render_chat(user("hello"))
        assert "None" not in str(renderer.chat_text([*user(None), {"role": "assistant"}]))
    two = user([{"type": "text", "text": "a"}, "b"])
    assert "user\na\nb<|im_end|>" in with_template(SMOLLM2_TEMPLATE).chat_text(two)
    assert with_template(PARTS_TEMPLATE).chat_text(two) == "[user]a|b|"
    assert with_template(EITHER_TEMPLATE).chat_text(two) == "[user]a/b/"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        (user(5), "messages[0].content"),
        (user([{"type": "hologram", "data": "x"}]), "messages[0].content[0].type"),
        (user([{"type": "text"}]), "messages[0].content[0]"),
        (user([{}]), "messages[0].content[0].type"),
        (user([3]), "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_name_the_place(renderer: Renderer, messages: object, param: str) -> None:
    """C02-06, TRAP-8: each malformed shape is an error that names where it is."""
    with pytest.raises(ChatError) as caught:
        renderer.render_chat(messages)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert param in str(caught.value)


def test_unknown_part_type_is_named(renderer: Renderer) -> None:
    """C02-06: the error for a part of another kind names the type and the ones that are known."""
    with pytest.raises(ChatError, match=r"'image_url'.*text"):
        renderer.render_chat(user([{"type": "image_url", "image_url": {"url": "x"}}]))


def test_untyped_text_part_is_read(renderer: Renderer) -> None:
    """C02-07: a part without a type is read by its field."""
    assert renderer.chat_text(user([{"text": "hi"}])) == renderer.chat_text(user("hi"))


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ('{"q": 1}', {"q": 1}),
        ({"q": 1}, {"q": 1}),
        ("", {}),
        (None, {}),
        ('{"q": "a "b" c"}', {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
        (3.5, {}),
    ],
)
def test_tool_call_arguments_are_repaired(arguments: object, want: dict) -> None:
    """C02-14, TRAP-10: strings are parsed, malformed ones become {} and never fail the request."""
    assert repair_arguments(arguments, "messages[1].tool_calls[0]") == want
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    chat = [*user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert f"<call>weather {json.dumps(want)}</call>" in with_template(TOOL_TEMPLATE).chat_text(chat)


def test_malformed_arguments_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """C02-14: the warning names the call and does not spell out its content."""
    repair_arguments('{"secret": ', "messages[1].tool_calls[0]")
    assert "messages[1].tool_calls[0]" in caplog.text and "secret" not in caplog.text


def test_tools_are_shown_or_described(renderer: Renderer) -> None:
    """TRAP-9: tools the template cannot show are described; earlier calls and results it cannot show become text."""
    described = renderer.chat_text([{"role": "system", "content": "Be brief."}, *user("x")], tools=[WEATHER])
    assert json.dumps(WEATHER["function"], ensure_ascii=False) in described and "Be brief." in described
    assert described.count("<|im_start|>system") == 1 and "<tool_call>" in described
    assert renderer.chat_text(user("x"), tools=[WEATHER]).count("<|im_start|>system") == 1
    results = [*user("x"), {"role": "tool", "content": "9"}]
    assert "<|im_start|>user\n<tool_response>\n9\n</tool_response>" in renderer.chat_text(results, tools=[WEATHER])
    no_system = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
    assert "weather" in with_template(no_system).chat_text(user("x"), tools=[WEATHER])
    assert '"x": "<a> & é"' in with_template(TOOL_TEMPLATE).chat_text(user("x"), tools=[WEATHER])
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"q": "a"}'}}
    chat = [*user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "9"}]
    text = renderer.chat_text(chat)
    assert "None" not in text
    call_text = '<tool_call>\n{"name": "weather", "arguments": {"q": "a"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call_text}<|im_end|>" in text


def test_template_errors_are_the_callers(renderer: Renderer) -> None:
    """A template's own refusal and one that cannot render are client errors with the reason."""
    with pytest.raises(ChatError, match=r"role banned is not allowed"):
        with_template(TOOL_TEMPLATE).render_chat([{"role": "banned", "content": "x"}])
    with pytest.raises(ChatError, match=r"UndefinedError"):
        with_template("{{ messages[0].missing.deeper }}").render_chat(user("x"))
    with pytest.raises(ModelError, match=r"line 2"):
        ChatTemplate("ok\n{% for %}")
    nested: dict = {}
    for _ in range(3000):
        nested = {"a": nested}
    with pytest.raises(ChatError, match=r"RecursionError"):
        with_template(TOOL_TEMPLATE).render_chat(user("x"), tools=[nested])


def test_templates_run_in_a_sandbox() -> None:
    """A template from a model cannot reach Python's internals or change what it is given."""
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages.__class__.__base__ }}"):
        with pytest.raises(ChatError):
            with_template(attack).render_chat(user("x"))


def test_no_template(tmp_path: Path) -> None:
    """A model without a template says so, and what to use."""
    bare = Renderer.load(write_tokenizer(tmp_path, template=None))
    with pytest.raises(ChatError, match=r"no chat template.*completions"):
        bare.render_chat(user("x"))


def test_named_templates(tmp_path: Path) -> None:
    """The template for tools is used when tools are given, whether listed in the config or in its own file."""
    folder = write_tokenizer(tmp_path, template=None)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    renderer = Renderer.load(folder)
    assert renderer.chat_text(user("x")) == "plain"
    assert renderer.chat_text(user("x"), tools=[WEATHER]) == "1 tools"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}")
    assert Renderer.load(folder).chat_text(user("x"), tools=[1]) == "[1]"


def test_continue_final_message(renderer: Renderer) -> None:
    """The prompt ends inside the last message; both options together are refused."""
    chat = [*user("x"), {"role": "assistant", "content": "Once upon"}]
    text = renderer.chat_text(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    with pytest.raises(ChatError, match=r"exclude each other"):
        renderer.chat_text(chat, continue_final_message=True)


def test_keyword_arguments_reach_the_template_but_not_its_own_names() -> None:
    """`chat_template_kwargs` are variables; messages and tools cannot be replaced through them."""
    assert with_template("{{ mood }}").chat_text(user("x"), kwargs={"mood": "calm"}) == "calm"
    with pytest.raises(ChatError, match=r"messages"):
        with_template("{{ mood }}").chat_text(user("x"), kwargs={"messages": []})


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [2, 0]}, {}, [2, 0]),
        ({"eos_token_id": 0}, {"eos_token_id": [2]}, [0]),
        (None, {"eos_token_id": [2, 0]}, [2, 0]),
        ({}, {}, [2]),
    ],
)
def test_end_of_sequence_ids(tmp_path: Path, generation: dict | None, config: dict, want: list[int]) -> None:
    """TRAP-19: the generation config wins over the model config, which wins over the tokenizer's token."""
    folder = write_tokenizer(tmp_path, generation_config=generation)
    (folder / "config.json").write_text(json.dumps(config))
    assert Renderer.load(folder).eos_token_ids == want


def test_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    """C14-06: what the model's generation config says about sampling, and nothing else of it."""
    generation = {"temperature": 0.6, "top_p": None, "do_sample": True, "max_new_tokens": 9, "bos_token_id": 1}
    folder = write_tokenizer(tmp_path, generation_config=generation)
    assert Renderer.load(folder).sampling_defaults == {"temperature": 0.6, "max_tokens": 9}


def test_damaged_folder(tmp_path: Path) -> None:
    """A missing or unreadable file is named."""
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        Renderer.load(tmp_path)
    folder = write_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json is not valid JSON"):
        Renderer.load(folder)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        Renderer.load(folder)


@given(st.text(max_size=200))
def test_encode_decode_round_trip(text: str) -> None:
    """Byte-level text comes back unchanged, and the bytes of the tokens add up to it."""
    renderer = Renderer(Tokenizer.from_str(tiny_tokenizer()))
    ids = renderer.encode(text)
    assert renderer.decode(ids) == text
    assert b"".join(renderer.token_text.bytes_of(i) for i in ids) == text.encode()
    longest = renderer.token_text.longest_bytes
    assert longest is not None and len(text.encode()) <= longest * len(ids)


def test_a_lone_surrogate_is_refused(renderer: Renderer) -> None:
    """Half of a surrogate pair, which JSON can carry, is the caller's error and not the tokenizer's crash."""
    with pytest.raises(UserError, match=r"U\+D800 at character 1"):
        renderer.encode("a\ud800b")


def test_a_text_that_cannot_fit_is_not_tokenised(renderer: Renderer) -> None:
    """TRAP-23: beyond max_model_len times the longest token, the answer needs no tokenising and states the numbers."""
    longest = renderer.token_text.longest_bytes
    assert longest is not None
    renderer.encode("z" * (256 * longest))
    with pytest.raises(PromptTooLong, match=f"{256 * longest + 1} characters.*256 tokens.*{longest} bytes"):
        renderer.encode("z" * (256 * longest + 1))


@pytest.mark.parametrize("unit", ["z", " ", "\U0001f99c", "\n", "7", "!"])
def test_long_runs_take_linear_time(unit: str) -> None:
    """TRAP-23: ten times the text takes about ten times the processor time, for runs of one character class."""
    renderer = Renderer(Tokenizer.from_str(tiny_tokenizer()))
    renderer.encode(unit * 20_000)
    short, long = (min(timed(renderer, unit * n) for _ in range(3)) for n in (20_000, 200_000))
    assert long < 40 * short + 0.05


def timed(renderer: Renderer, text: str) -> float:
    start = time.process_time()
    renderer.encode(text)
    return time.process_time() - start


def test_a_long_prompt_does_not_hold_the_event_loop() -> None:
    """TRAP-23: while a long text is tokenised the loop keeps turning."""
    renderer = with_template(SMOLLM2_TEMPLATE)
    renderer.warm_up()

    async def ticks() -> tuple[float, float]:
        start = time.perf_counter()
        task = asyncio.create_task(renderer.render_chat_async(user("a b " * 100_000)))
        worst = 0.0
        while not task.done():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - before)
        return worst, time.perf_counter() - start

    worst, total = asyncio.run(ticks())
    assert worst < max(0.5 * total, 0.1)


def test_imports_stay_light() -> None:
    """The renderer's process needs neither torch nor transformers."""
    code = "import sys, treadle.runtime.renderer; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
