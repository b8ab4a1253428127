import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hybserve.core.errors import ModelError, RequestError
from hybserve.core.messages import ChatPrompt
from hybserve.text.chat import ChatTemplates
from hybserve.text.tokenize import Tokenizer

CONTEXT, LIMIT = 512, 20_000
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": '  Hi there, 你好 🙂 <b>"quoted"</b>\n'}
THOUGHT = {"role": "assistant", "content": "Hello!  ", "reasoning_content": "\nthey greet\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"ö": [1, None, "<"]}}}],
}
TOOL = {"role": "tool", "content": "42", "tool_call_id": "1"}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, THOUGHT, USER],
    "tools": [USER, CALL, TOOL],
    "ends with assistant": [USER, THOUGHT],
}


def prompt(messages: Any, template: str | None = None, kwargs: Any = None, **flags: bool) -> ChatPrompt:
    raw = json.dumps(messages, ensure_ascii=False).encode()
    return ChatPrompt(raw, json.dumps(kwargs or {}).encode(), template, **flags)


def templates(source: str | None = None, names: dict[str, str] | None = None) -> ChatTemplates:
    return ChatTemplates({} if source is None else {"default": source}, names or {}, CONTEXT, LIMIT)


@pytest.fixture(scope="module")
def ours(tokenizers: dict[str, Tokenizer]) -> dict[str, ChatTemplates]:
    return {kind: ChatTemplates(t.chat_templates, t.names, CONTEXT, LIMIT) for kind, t in tokenizers.items()}


@pytest.fixture(scope="module")
def references(model_dirs: dict[str, Path]) -> dict[str, Any]:
    return {kind: AutoTokenizer.from_pretrained(model_dirs[kind]) for kind in ("byte-level", "llama")}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True, "extra": [1, {"a": 2}]}])
@pytest.mark.parametrize("generate", [True, False])
def test_text_equals_transformers(
    name: str, kwargs: dict[str, Any], generate: bool, ours: dict[str, ChatTemplates], references: dict[str, Any]
) -> None:
    messages = CONVERSATIONS[name]
    for kind, reference in references.items():
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **kwargs)
        assert ours[kind].render(prompt(messages, kwargs=kwargs, add_generation_prompt=generate)) == expected


@pytest.mark.parametrize("content", ["Once upon", "Once upon  ", "x\n\n", "🙂"])
def test_continued_message_equals_transformers(
    content: str, ours: dict[str, ChatTemplates], references: dict[str, Any]
) -> None:
    for kind, last in (("byte-level", "assistant"), ("llama", "user")):
        messages = [USER, {"role": last, "content": content}]
        expected = references[kind].apply_chat_template(messages, tokenize=False, continue_final_message=True)
        flags = {"add_generation_prompt": False, "continue_final_message": True}
        assert ours[kind].render(prompt(messages, **flags)) == expected


@settings(max_examples=100, deadline=None)
@given(
    contents=st.lists(st.text(max_size=30), min_size=1, max_size=4),
    source=st.sampled_from(
        [
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}|{% endfor %}",
            "{% for m in messages %}\n    {{ m | tojson }}\n{% endfor %}\n",
            "{{ messages | tojson(indent=2) }}{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}",
            "{% macro f(m) %}{{ m.content | upper }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
            "{{ dict(a=1) }}{{ messages[0]['content'] | e }}{{ missing }}",
        ]
    ),
)
def test_F26_any_content_and_the_extras_of_templates(
    contents: list[str], source: str, references: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    expected = references["byte-level"].apply_chat_template(messages, chat_template=source, tokenize=False)
    assert templates().render(prompt(messages, source, add_generation_prompt=False)) == expected


def test_time_is_there() -> None:
    assert templates("{{ strftime_now('%Y') | length }}").render(prompt([USER])) == "4"


def refused(chat: ChatTemplates, question: ChatPrompt) -> Any:
    with pytest.raises(RequestError) as caught:
        chat.render(question)
    return caught.value.body


def test_a_template_may_refuse(ours: dict[str, ChatTemplates]) -> None:
    body = refused(ours["byte-level"], prompt([USER, SYSTEM]))
    assert (body.status, body.code, body.param) == (400, "invalid_value", "messages")
    assert "System message must be at the beginning." in body.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ messages.nothing.more }}",
        "{{ range(10 ** 9) | list }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_F34_what_the_sandbox_stops_is_the_requests_error(source: str) -> None:
    body = refused(templates(), prompt([USER], source))
    assert body.status == 400
    for word in ("Error", "Traceback", "0x", "/"):
        assert word not in body.message


def test_F34_output_is_capped_while_it_is_made() -> None:
    body = refused(templates(), prompt([USER], "{% for i in range(90000) %}{{ 'x' * 100 }}{% endfor %}"))
    assert body.code == "context_length_exceeded"


def test_F34_a_template_that_does_not_compile() -> None:
    assert refused(templates(), prompt([USER], "{% for %}")).param == "chat_template"
    with pytest.raises(ModelError, match="does not compile"):
        templates("{% for %}")


@pytest.mark.parametrize("raw", [b"[]", b"{}", b"[1]", b"[", b'[{"role":"user","content":"\\ud800"}]', b"\xff"])
def test_F26_F27_messages_that_are_none(raw: bytes) -> None:
    body = refused(templates("x"), ChatPrompt(raw))
    assert (body.status, body.param) == (400, "messages")


def test_F26_a_template_that_makes_half_a_surrogate_pair() -> None:
    assert refused(templates("{{ '\\ud800' }}"), prompt([USER])).status == 400


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"])
def test_template_variables_of_the_server_cannot_be_replaced(name: str) -> None:
    body = refused(templates("{{ messages }}"), prompt([USER], kwargs={name: 1}))
    assert body.param == f"chat_template_kwargs.{name}"


def test_template_kwargs_must_be_an_object() -> None:
    assert refused(templates("x"), prompt([USER], kwargs=[1])).param == "chat_template_kwargs"


def test_special_tokens_may_be_replaced() -> None:
    chat = templates("{{ bos_token }}", {"bos_token": "<s>"})
    assert chat.render(prompt([USER])) == "<s>"
    assert chat.render(prompt([USER], kwargs={"bos_token": "!"})) == "!"


def test_no_template() -> None:
    assert refused(templates(), prompt([USER])).code == "unsupported_parameter"


def test_what_cannot_be_continued(ours: dict[str, ChatTemplates]) -> None:
    chat = ours["byte-level"]
    for messages, generate in (([USER, {"role": "assistant", "content": ""}], False), ([USER, THOUGHT], True)):
        question = prompt(messages, add_generation_prompt=generate, continue_final_message=True)
        assert refused(chat, question).param == "continue_final_message"
    dropping = templates("{{ messages[0].content }}")
    question = prompt([USER, THOUGHT], add_generation_prompt=False, continue_final_message=True)
    assert refused(dropping, question).param == "continue_final_message"
