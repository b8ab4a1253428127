"""Bodies to orders: every field's type and range (F22 to F32, F38 to F40), neutral values, normal forms."""

import json
import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybserve.api.schema import MAX_CHARS_PER_TOKEN, Schema
from hybserve.core.errors import RequestError
from tests.api.conftest import FACTS

SCHEMA = Schema(FACTS)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


def chat(**fields):
    return SCHEMA.chat({**CHAT, **fields})


def completion(**fields):
    return SCHEMA.completion({**TEXT, **fields})


def refused(parse, *args, code="invalid_value", status=400, **fields):
    with pytest.raises(RequestError) as caught:
        parse(*args, **fields)
    body = caught.value.body
    assert (body.status, body.code) == (status, code), body
    assert len(body.message) < 600
    return body


INTEGERS = ["max_tokens", "n", "seed", "top_k", "min_tokens", "priority", "best_of"]
NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
BOOLEANS = ["stream", "ignore_eos", "include_stop_str_in_output", "return_token_ids", "echo"]


@pytest.mark.parametrize("field", [*INTEGERS, "logprobs"])
@pytest.mark.parametrize("value", [1.0, 1.5, True, False, "1", [], {}, 2**63, -(2**63) - 1, 10**4000, -0.0])
def test_f23_integers_are_integers(field, value):
    assert refused(completion, **{field: value}).param == field


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [True, "1", [], {}, 1e308, -1e308, 10**400, -5])
def test_f22_f29_numbers_are_numbers_in_range(field, value):
    assert refused(chat, **{field: value}).param == field


@pytest.mark.parametrize("field", BOOLEANS)
@pytest.mark.parametrize("value", [0, 1, "true", [], {}])
def test_booleans_are_booleans(field, value):
    assert refused(completion, **{field: value}).param == field


@pytest.mark.parametrize("field", [*INTEGERS, *NUMBERS, *BOOLEANS, "logprobs", "stop", "logit_bias", "stop_token_ids"])
def test_null_is_absent(field):
    assert completion(**{field: None}) == completion()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("n", 0), ("n", 129), ("n", 10**9), ("top_p", 0), ("top_p", 1.01),
        ("top_k", -2), ("min_p", 1.1), ("temperature", 2.01), ("temperature", -0.1), ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5), ("repetition_penalty", 0), ("logprobs", 21), ("logprobs", -1), ("logprobs", 10**6),
        ("min_tokens", 17), ("min_tokens", -1), ("best_of", 0), ("priority", 2**31),
    ],
)  # fmt: skip
def test_f29_out_of_range(field, value):
    assert refused(completion, **{field: value}).param == field


def test_f29_documented_clamps():
    assert chat(temperature=1e-300).sampling.temperature == 0.0
    assert chat(top_k=10**9).sampling.top_k == 0
    assert chat(top_k=-1).sampling.top_k == 0
    assert 0 <= chat(seed=-5).seed < 2**63


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **{name: st.integers() | st.floats() for name in NUMBERS},
            **{name: st.integers() for name in ("top_k", "max_tokens", "seed", "min_tokens", "n", "logprobs")},
        },
    )
)
@settings(max_examples=300, deadline=None)
def test_f29_whatever_is_accepted_is_in_range(fields):
    try:
        order = completion(**fields)
    except RequestError as error:
        if error.body.status != 400:
            raise
        return
    sampling = order.sampling
    assert sampling.temperature == 0 or 1e-4 <= sampling.temperature <= 2
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.top_k < FACTS.vocab_size
    assert 0 <= sampling.min_p <= 1
    assert sampling.repetition_penalty > 0
    assert abs(sampling.presence_penalty) <= 2
    assert abs(sampling.frequency_penalty) <= 2
    assert 1 <= sampling.max_tokens < 2**63
    assert sampling.min_tokens <= sampling.max_tokens
    assert -1 <= sampling.logprobs <= 20
    assert 1 <= order.n <= 128


@pytest.mark.parametrize("bad", [-1, 1000, 2**40, 5279552648203111001, True, 1.0, "1", None])
def test_f30_token_ids_are_checked_against_the_logit_width(bad):
    assert refused(SCHEMA.completion, {"prompt": [1, bad]}).param == "prompt[1]"
    assert refused(SCHEMA.completion, {"prompt": [[1], [1, bad]]}).param == "prompt[1][1]"
    assert refused(completion, stop_token_ids=[bad]).param == "stop_token_ids[0]"
    assert refused(SCHEMA.detokenize, {"tokens": [bad]}).param == "tokens[0]"
    if type(bad) is int:
        assert refused(completion, logit_bias={str(bad): 1}).param == "logit_bias"


@pytest.mark.parametrize("key", ["01", "+1", " 1", "1.0", "x", "", "١", "1\n", "-0"])
def test_f30_logit_bias_keys(key):
    refused(completion, logit_bias={key: 1})


@pytest.mark.parametrize("value", [None, "1", True, 101, -100.5, [], 10**400])
def test_logit_bias_values(value):
    assert refused(completion, logit_bias={"1": value}).param == "logit_bias.1"


def test_logit_bias():
    assert completion(logit_bias={"999": -100, "0": 0.5}).sampling.logit_bias == ((999, -100.0), (0, 0.5))
    refused(completion, logit_bias={str(i): 1 for i in range(1000)} | {str(i): 1 for i in range(2000)})
    refused(completion, logit_bias=[])


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], [None], [["a"]], [1, "a"], ["a", 1], 5, True, {}, ["a", ["b"]], [[1], 2], [True]]
)
def test_f27_bad_prompts(prompt):
    assert refused(SCHEMA.completion, {"prompt": prompt}).param.startswith("prompt")


def test_prompt_is_required():
    assert refused(SCHEMA.completion, {}).param == "prompt"
    assert refused(SCHEMA.chat, {}).param == "messages"


def test_f28_huge_orders_are_refused_before_anything_is_made():
    tracemalloc.start()
    began = time.monotonic()
    refused(completion, n=10**9)
    refused(completion, best_of=10**9, code="unsupported_parameter")
    refused(completion, logprobs=10**6)
    refused(SCHEMA.completion, {"prompt": ["a"] * 10**5})
    refused(SCHEMA.completion, {"prompt": ["a"] * 2000, "n": 128, "max_tokens": 4000})
    assert time.monotonic() - began < 5
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_f31_prompts_that_cannot_fit():
    limit = FACTS.max_seq_len
    refused(SCHEMA.completion, {"prompt": "a" * (limit * MAX_CHARS_PER_TOKEN + 1)}, code="context_length_exceeded")
    body = refused(SCHEMA.completion, {"prompt": [1] * limit}, code="context_length_exceeded")
    assert str(limit) in body.message
    messages = [{"role": "user", "content": "a" * (8 * limit * MAX_CHARS_PER_TOKEN + 1)}]
    refused(SCHEMA.chat, {"messages": messages}, code="context_length_exceeded")


@pytest.mark.parametrize("stop", ["", [""], ["a"] * 17, ["a"] * 10_000, "x" * 257, "é" * 129, [1], [None], 5, {}])
def test_f32_bad_stops(stop):
    refused(completion, stop=stop)


def test_f32_good_stops():
    assert completion(stop="\n").stop == ("\n",)
    assert completion(stop=["👩‍👩‍👧", "x" * 256]).stop == ("👩‍👩‍👧", "x" * 256)
    assert completion(stop=[]).stop == ()


@pytest.mark.parametrize("name", ["../../etc/passwd", "tiny\0", "x" * 10**6, "", "TINY"])
def test_f39_unknown_models_are_404(name):
    body = refused(completion, model=name, code="model_not_found", status=404)
    assert body.param == "model"
    assert "tiny" in body.message


def test_f39_model_names():
    assert completion().model == "tiny"
    assert completion(model="org/tiny").model == "org/tiny"
    refused(completion, model=5)
    refused(completion, lora_path="/x", code="unsupported_parameter")


@pytest.mark.parametrize("salt", ["", "x" * 129, "é" * 65, 5, ["a"], "x" * 10**6])
def test_f40_bad_cache_salts(salt):
    assert refused(completion, cache_salt=salt).param == "cache_salt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]), ("tool_choice", "auto"), ("tool_choice", {"type": "function"}),
        ("functions", [{}]), ("response_format", {"type": "json_object"}), ("modalities", ["audio"]),
        ("response_format", {"type": "json_schema", "json_schema": {}}), ("guided_json", {}), ("guided_regex", "a"),
        ("structured_outputs", {"regex": "a"}), ("prompt_logprobs", 0), ("bad_words", ["a"]), ("best_of", 5),
        ("use_beam_search", True), ("skip_special_tokens", False), ("echo", True), ("audio", {}),
        ("thinking_token_budget", 5), ("length_penalty", 1.5), ("logits_processors", ["os.system"]),
        ("chat_template", "{{ x }}"), ("images", ["http://x"]),
    ],
)  # fmt: skip
def test_known_but_unsupported_fields(field, value):
    assert refused(chat, code="unsupported_parameter", **{field: value}).param == field


def test_f34_request_template_only_where_allowed():
    refused(chat, code="unsupported_parameter", chat_template="{{ x }}")
    order = Schema(FACTS, allow_request_template=True).chat({**CHAT, "chat_template": "{{ x }}"})
    assert order.prompts[0].template == "{{ x }}"


@pytest.mark.parametrize(
    "value",
    [
        {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "text"}},
        {"parallel_tool_calls": True}, {"best_of": 1}, {"n": 2, "best_of": 2}, {"logit_bias": {}}, {"functions": []},
        {"skip_special_tokens": True}, {"use_beam_search": False}, {"suffix": None}, {"modalities": ["text"]},
        {"structured_outputs": {}}, {"stop": None}, {"stream_options": None}, {"bad_words": []},
    ],
)  # fmt: skip
def test_neutral_values_are_accepted(value):
    order = chat(**value)
    assert order.ignored == ()


def test_f38_embeddings_images_and_urls_are_refused():
    refused(completion, prompt_embeds="AAAA", code="unsupported_parameter")
    for kind in ("image_url", "input_audio", "file", "video_url"):
        messages = [{"role": "user", "content": [{"type": kind, kind: {"url": "http://169.254.169.254/"}}]}]
        assert refused(SCHEMA.chat, {"messages": messages}, code="unsupported_parameter").param == (
            "messages[0].content[0]"
        )


@pytest.mark.parametrize("value", [{}, {"type": "yaml"}, {"type": 5}, "text", []])
def test_unknown_response_formats(value):
    refused(chat, response_format=value)


def messages_of(*messages):
    return json.loads(SCHEMA.chat({"messages": list(messages)}).prompts[0].messages_json)


def test_messages_are_normalised():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    assert messages_of(
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": ""},
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "x", "reasoning_content": "y", "reasoning": "z", "tool_calls": None},
    ) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"x": '}},
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "assistant", "content": "x", "reasoning_content": "y"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"), ({}, "messages[0].role"), ({"role": 5, "content": ""}, "messages[0].role"),
        ({"role": "robot", "content": ""}, "messages[0].role"), ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "user", "content": "", "name": 5}, "messages[0].name"),
    ],
)  # fmt: skip
def test_bad_messages_name_the_place(message, param):
    assert refused(SCHEMA.chat, {"messages": [message]}).param == param


@pytest.mark.parametrize("messages", [None, [], "hi", {}])
def test_f27_no_messages(messages):
    assert refused(SCHEMA.chat, {"messages": messages}).param == "messages"


def test_max_tokens_names():
    assert chat().sampling.max_tokens == 0
    assert chat(max_tokens=5).sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).sampling.max_tokens == 7
    assert completion().sampling.max_tokens == 16


def test_chat_logprobs():
    assert chat().sampling.logprobs == -1
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    refused(chat, top_logprobs=2)
    refused(chat, logprobs=True, top_logprobs=21)
    refused(chat, logprobs=1)


def test_template_arguments():
    order = chat(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="none")
    assert json.loads(order.prompts[0].template_kwargs_json) == {"enable_thinking": True}
    for key in ("messages", "tokenize", "add_generation_prompt", "a b", "__class__ "):
        refused(chat, chat_template_kwargs={key: 1})
    refused(chat, chat_template_kwargs=[])
    refused(chat, reasoning_effort="extreme")


def test_continuing_a_message():
    assistant = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    prompt = chat(messages=assistant, continue_final_message=True).prompts[0]
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt
    refused(chat, messages=assistant, continue_final_message=True, add_generation_prompt=True)
    refused(chat, continue_final_message=True)


def test_stream_options():
    refused(chat, stream_options={"include_usage": True})
    refused(chat, stream=True, stream_options={"include_usage": 1})
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage


def test_effective_defaults_come_from_the_facts():
    sampling = completion().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.8, 20)
    assert completion(temperature=0).sampling.greedy


KNOWN = sorted({
    "prompt", "messages", "model", "stop", "logit_bias", "stop_token_ids", "cache_salt", "stream_options", "logprobs",
    "top_logprobs", "max_completion_tokens", "chat_template_kwargs", "chat_template", "reasoning_effort", "request_id",
    "add_generation_prompt", "continue_final_message", "response_format", "tools", "tokens", "return_token_strs",
    "add_special_tokens", *INTEGERS, *NUMBERS, *BOOLEANS,
})  # fmt: skip
SCALARS = (None, True, False, 0, 1, -1, 2**63, 10**30, 0.5, -0.0, 1e308, "", "x", "text", "user", "tiny", "\0", "5")
KEYS = (
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "id",
    "5",
    "include_usage",
    "",
)


def any_json(dice, depth=3):
    kind = dice.randrange(6) if depth else 0
    if kind < 4:
        return dice.choice(SCALARS)
    if kind == 4:
        return [any_json(dice, depth - 1) for _ in range(dice.randrange(3))]
    return {dice.choice(KEYS): any_json(dice, depth - 1) for _ in range(dice.randrange(4))}


def any_message(dice):
    message = {key: any_json(dice) for key in dice.sample(KEYS, 2)}
    content = dice.choice(["x", [{"type": "text", "text": ""}]])
    good = {"role": dice.choice(["user", "assistant", "tool"]), "content": content}
    return {**good, **message} if dice.random() < 0.7 else any_json(dice)


@pytest.mark.parametrize("parse", [SCHEMA.chat, SCHEMA.completion, SCHEMA.tokenize, SCHEMA.detokenize])
def test_any_json_is_an_order_or_a_clean_refusal(parse):
    dice = random.Random(5)
    accepted = 0
    for _ in range(3000):
        body = {key: any_json(dice) for key in dice.sample(KNOWN, dice.randrange(3))}
        body.setdefault("prompt", "x")
        body.setdefault("tokens", [1])
        if parse == SCHEMA.tokenize and dice.random() < 0.5:
            del body["prompt"]
        if dice.random() < 0.8:
            body["messages"] = [any_message(dice) for _ in range(dice.randrange(3))]
        try:
            parse(body)
            accepted += 1
        except RequestError as error:
            if error.body.status not in (400, 404) or not error.body.code:
                raise
    assert accepted
