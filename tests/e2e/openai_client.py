"""What openai-python sees of a server: ``python openai_client.py URL [KEY]`` prints {check: "ok" or what went wrong}.

A process of its own, because importing the SDK takes most of a second and must never happen in the server's process.
"""

import json
import sys
import traceback
from collections.abc import Callable

import openai

CHECKS: dict[str, Callable[[openai.OpenAI], None]] = {}
MESSAGES = [{"role": "user", "content": "Tell me something."}]


def check(function: Callable[[openai.OpenAI], None]) -> Callable[[openai.OpenAI], None]:
    CHECKS[function.__name__] = function
    return function


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@check
def models(client):
    listed = client.models.list().data
    assert listed[0].object == "model"
    assert client.models.retrieve(listed[0].id).id == listed[0].id


@check
def chat(client):
    answer = client.chat.completions.create(model=model_of(client), messages=MESSAGES, max_tokens=6)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert isinstance(answer.choices[0].message.content, str)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 1 <= answer.usage.completion_tokens <= 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id


@check
def chat_stream(client):
    options = {"include_usage": True}
    extra = {"ignore_eos": True}
    chunks = list(
        client.chat.completions.create(
            model=model_of(client), messages=MESSAGES, max_tokens=6, stream=True, stream_options=options,
            extra_body=extra, temperature=0,
        )
    )  # fmt: skip
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *content, usage = chunks
    assert usage.choices == []
    assert usage.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in content)
    assert content[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in content][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in content[:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in content)
    whole = client.chat.completions.create(
        model=model_of(client), messages=MESSAGES, max_tokens=6, extra_body=extra, temperature=0
    )
    assert text == whole.choices[0].message.content


@check
def no_usage_chunk_unless_asked(client):
    chunks = list(client.completions.create(model=model_of(client), prompt="abc", max_tokens=3, stream=True))
    assert all(chunk.choices for chunk in chunks)


@check
def completion(client):
    answer = client.completions.create(model=model_of(client), prompt="Once upon", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].index == 0


@check
def completion_of_a_batch(client):
    answer = client.completions.create(
        model=model_of(client), prompt=["one", "two"], n=2, max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 12


@check
def two_choices(client):
    answer = client.chat.completions.create(
        model=model_of(client), messages=MESSAGES, n=2, max_tokens=8, temperature=1.5, seed=3,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    seen = set()
    for chunk in client.chat.completions.create(
        model=model_of(client), messages=MESSAGES, n=2, max_tokens=4, stream=True
    ):
        seen.update(choice.index for choice in chunk.choices)
    assert seen == {0, 1}


@check
def seeds(client):
    def text(seed):
        answer = client.chat.completions.create(
            model=model_of(client), messages=MESSAGES, max_tokens=12, temperature=1.3, seed=seed,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        return answer.choices[0].model_extra["token_ids"]

    assert text(11) == text(11)
    assert text(11) != text(12)


@check
def chat_logprobs(client):
    answer = client.chat.completions.create(
        model=model_of(client), messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert abs(entry.top_logprobs[0].logprob - entry.logprob) < 1e-6  # greedy: the token is the likeliest
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace") == (
        answer.choices[0].message.content
    )


@check
def completion_logprobs_with_echo(client):
    answer = client.completions.create(
        model=model_of(client), prompt="Once upon a time", max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    count = len(logprobs.tokens)
    assert count == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(isinstance(value, float) for value in logprobs.token_logprobs[1:])
    assert len(logprobs.top_logprobs) == len(logprobs.text_offset) == count
    assert choice.text.startswith("Once upon a time")


@check
def stop_strings_end_the_text(client):
    free = client.completions.create(
        model=model_of(client), prompt="Once", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    text = free.choices[0].text
    middle = text[len(text) // 2 :][:1]
    if not middle or middle == "\N{REPLACEMENT CHARACTER}":
        return
    stopped = client.completions.create(
        model=model_of(client), prompt="Once", max_tokens=12, temperature=0, stop=middle,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert stopped.choices[0].text == text[: text.index(middle)]
    assert stopped.choices[0].finish_reason == "stop"


def raises(kind, status, code, call):
    caught = None
    try:
        call()
    except kind as error:
        caught = error
    assert caught is not None, f"no {kind.__name__}"
    assert (caught.status_code, caught.code) == (status, code), caught
    assert caught.request_id, caught
    return caught


@check
def bad_requests(client):
    model = model_of(client)
    create = client.chat.completions.create
    error = raises(
        openai.BadRequestError, 400, "invalid_value", lambda: create(model=model, messages=MESSAGES, temperature=9)
    )
    assert error.param == "temperature"
    assert error.type == "invalid_request_error"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    raises(
        openai.BadRequestError, 400, "unsupported_parameter",
        lambda: create(model=model, messages=MESSAGES, tools=tools),
    )  # fmt: skip
    raises(
        openai.BadRequestError, 400, "context_length_exceeded",
        lambda: create(model=model, messages=MESSAGES, max_tokens=10**8),
    )  # fmt: skip


@check
def a_bad_streaming_request_raises_too(client):
    raises(
        openai.BadRequestError, 400, "invalid_value",
        lambda: client.chat.completions.create(model=model_of(client), messages=[], stream=True),
    )  # fmt: skip


@check
def not_found(client):
    raises(
        openai.NotFoundError, 404, "model_not_found",
        lambda: client.chat.completions.create(model="nope", messages=MESSAGES),
    )  # fmt: skip
    raises(openai.NotFoundError, 404, "not_found", lambda: client.embeddings.create(model="x", input="y"))


def main() -> None:
    url, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
    results = {}
    for name, function in CHECKS.items():
        try:
            function(client)
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc(limit=-3)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
