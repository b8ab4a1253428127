"""Landmarks of conversations, and their way from characters to tokens."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybserve.core.messages import ChatPrompt, TextPrompt
from hybserve.core.types import ServingFacts
from hybserve.text import anchors
from hybserve.text.anchors import render_with_landmarks
from hybserve.text.chat import ChatTemplates
from hybserve.text.jobs import Encode, Encoded, WorkerSettings
from hybserve.text.tokenize import Tokenizer
from hybserve.text.worker import Workshop

#: As templates of the Qwen3.5 family behave: only what follows the last question keeps its thoughts, and a conversation
#: without a question is refused.
THINKING = """{%- set last = namespace(question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- if last.question < 0 %}{{ raise_exception('There is no question.') }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.question %}
            {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) }}{% endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n[' + m.content + ']<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "One?"}
ANSWER = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
SECOND = {"role": "user", "content": " Two 🙂? "}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "look it up",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
}
TOOL = {"role": "tool", "content": "42", "tool_call_id": "1"}


def chat(source: str = THINKING) -> ChatTemplates:
    return ChatTemplates({"default": source}, {}, 4096, 200_000)


def prompt(messages: Any, kwargs: Any = None, **flags: bool) -> ChatPrompt:
    return ChatPrompt(json.dumps(messages).encode(), json.dumps(kwargs or {}).encode(), **flags)


def pieces(source: str, question: ChatPrompt) -> list[str]:
    """The text, cut at its landmarks."""
    text, marks = render_with_landmarks(chat(source), question)
    assert text == chat(source).render(question)
    return [text[low:high] for low, high in zip([0, *marks], [*marks, len(text)], strict=True)]


@pytest.mark.parametrize("thinking", [True, False])
def test_end_of_the_last_message_and_start_of_the_last_question(thinking: bool) -> None:
    before, question, generation = pieces(THINKING, prompt([SYSTEM, FIRST], {"enable_thinking": thinking}))
    assert before == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert question == "One?<|im_end|>\n"
    assert generation == "<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n")


def test_a_dropped_thought_leaves_the_next_turn_a_landmark_to_hit() -> None:
    """The first turn's last landmark is a prefix of the second turn's text, though its whole text is not."""
    first, marks = render_with_landmarks(chat(), prompt([SYSTEM, FIRST]))
    second = chat().render(prompt([SYSTEM, FIRST, ANSWER, SECOND]))
    assert not second.startswith(first)
    assert second.startswith(first[: marks[-1]])
    *before, question, _ = pieces(THINKING, prompt([SYSTEM, FIRST, ANSWER, SECOND]))
    assert question == "Two 🙂?<|im_end|>\n"
    assert "".join(before).endswith("Yes.<|im_end|>\n<|im_start|>user\n")


def test_tool_answers_come_behind_the_last_question() -> None:
    before, turn, generation = pieces(THINKING, prompt([FIRST, CALL, TOOL]))
    assert before == "<|im_start|>user\n"
    assert turn.startswith("One?<|im_end|>\n<|im_start|>assistant\n<think>\nlook it up")
    assert turn.endswith("[42]<|im_end|>\n")
    assert generation == "<|im_start|>assistant\n<think>\n"


def test_without_a_generation_prompt_the_end_is_no_landmark() -> None:
    for question in (
        prompt([FIRST, ANSWER], add_generation_prompt=False),
        prompt([FIRST, ANSWER], add_generation_prompt=False, continue_final_message=True),
    ):
        before, rest = pieces(THINKING, question)
        assert before == "<|im_start|>user\n"
        assert rest.startswith("One?")


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (PLAIN, [SYSTEM], ["<system>Be brief.", "<go>"]),  # nobody asked anything
        ("<begin>" + PLAIN, [FIRST, ANSWER], ["<begin><user>", "One?<assistant>Yes.", "<go>"]),
        # the messages are written otherwise without a generation prompt
        ("{% if add_generation_prompt %}!{% endif %}" + PLAIN, [FIRST], ["!<user>", "One?<go>"]),
        # … or refused
        (
            "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}" + PLAIN,
            [FIRST],
            ["<user>", "One?<go>"],
        ),
        # the question stands before everything else
        ("{{ messages[-1].content }}" + PLAIN, [SYSTEM, FIRST], ["One?<system>Be brief.<user>One?", "<go>"]),
        ("{{ messages[0].content }}", [FIRST], ["One?"]),
        (
            "{% if 'One' not in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + PLAIN,
            [FIRST],
            ["<user>One?", "<go>"],
        ),
    ],
)
def test_what_cannot_be_told_is_left_out(source: str, messages: Any, expected: list[str]) -> None:
    assert pieces(source, prompt(messages)) == expected


def test_F34_a_slow_template_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "PATIENCE", -1.0)
    assert render_with_landmarks(chat(), prompt([FIRST]))[1] == []


# characters to tokens


def test_marks_around_and_inside_of_an_emoji(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    text = "a🦜b<|im_end|>🦜"
    ids, _ = tokenizer.encode_with(text, False, [])
    parrot = len(tokenizer.encode("🦜", False))
    assert parrot > 1  # its bytes are tokens of their own
    assert len(ids) == 2 * parrot + 3
    expected = {1: [1], 2: [parrot + 1], 3: [parrot + 2], 13: [parrot + 3], 5: [parrot + 2], 0: []}
    assert {mark: tokenizer.encode_with(text, False, [mark])[1] for mark in expected} == expected
    assert tokenizer.encode_with(text, False, list(expected))[1] == [1, parrot + 1, parrot + 2, parrot + 3]


def test_a_mark_inside_of_a_token_goes_back_to_its_start(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    text = "The dog The dog"
    ids = tokenizer.encode(text, False)
    ends = [len(tokenizer.backend.decode(ids[:count])) for count in range(len(ids) + 1)]
    assert max(b - a for a, b in itertools.pairwise(ends)) > 1
    for mark in range(len(text)):
        wanted = max(count for count, end in enumerate(ends) if end <= mark)
        assert tokenizer.encode_with(text, False, [mark])[1] == ([wanted] if wanted else [])


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma", "metaspace", "words"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tokens_before_a_mark_hold_only_text_before_it(kind: str, tokenizers: dict[str, Tokenizer], data: Any) -> None:
    """Whatever the text after the mark: the tokens before it are found again in another text with the same start, up to
    the token that touches the mark (normal forms may join across it)."""
    tokenizer = tokenizers[kind]
    words = st.sampled_from(["The ", "fox", " ", "🙂", "é", "e\u0301", "\n\n", "<|im_end|>", "w7", "你好", "x"])
    text = "".join(data.draw(st.lists(words, min_size=1, max_size=12)))
    mark = data.draw(st.integers(0, len(text) - 1))
    ids, found = tokenizer.encode_with(text, True, [mark])
    assert ids == tokenizer.encode(text, True)
    offsets = tokenizer.backend.encode(text, add_special_tokens=True).offsets
    for count in found:
        assert 0 < count < len(ids)
        assert all(start < mark for start, end in offsets[:count] if end > 0)
        assert any(end > mark for _, end in offsets[count:])


def test_the_beginning_token_counts(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama"]
    ids, (count,) = tokenizer.encode_with("🙂🙂", True, [1])
    assert ids[0] == tokenizer.bos_id
    assert ids[:count] == tokenizer.encode("🙂", True)


# the worker


@pytest.fixture(scope="module")
def workshop(make_facts: Any) -> Workshop:
    facts: ServingFacts = make_facts()
    return Workshop(WorkerSettings(facts.model_dir, facts.vocab_size, facts.eos_ids, facts.max_seq_len))


def test_anchors_of_a_job(workshop: Workshop, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    done = workshop.do(Encode(1, prompt([SYSTEM, SECOND]), False, anchors=True, return_text=True))
    assert isinstance(done, Encoded)
    start, end = done.anchors
    assert done.text == tokenizer.backend.decode(done.ids, skip_special_tokens=False)
    assert done.ids[end:] == tokenizer.encode("<|im_start|>assistant\n<think>\n", False)
    assert tokenizer.backend.decode(done.ids[start:end], skip_special_tokens=False) == " Two 🙂? <|im_end|>\n"
    again = workshop.do(Encode(2, prompt([SYSTEM, SECOND]), False))
    assert again == Encoded(2, done.ids)
    assert workshop.do(Encode(3, TextPrompt("hi"), False, anchors=True)) == Encoded(3, tokenizer.encode("hi", False))
