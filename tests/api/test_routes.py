"""The routes over a live server with a scripted text role."""

import json

from hybserve.core.errors import ErrorBody
from hybserve.core.messages import ChatPrompt, Submit, TextPrompt, TokenPrompt

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_chat_whole(live):
    status, headers, body = live.post("/v1/chat/completions", {**CHAT, "model": "tiny"})
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert body["hybserve"]["cache"] == {
        "kv_hit": 2, "state_hit": 0, "hit": 1, "reason": "no_checkpoint", "at": 0,
        "tiers": {"device": 1, "host": 0, "file": 0},
    }  # fmt: skip
    assert body["hybserve"]["timing_ms"]["ttft"] == 3.0
    assert body["hybserve"]["tok_per_s"] == 30.0
    assert headers["x-request-id"]
    (submit,) = live.text.submits()
    assert isinstance(submit.prompt, ChatPrompt)
    assert json.loads(submit.prompt.messages_json) == CHAT["messages"]
    assert submit.sampling.temperature == 0.7  # the server's default
    assert submit.sampling.max_tokens == 0  # fill the context
    assert submit.add_special_tokens is False


def test_chat_stream(live):
    events = live.stream("/v1/chat/completions", CHAT)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": "Hello"}
    assert [d["finish_reason"] for d in deltas] == [None, None, None, "stop"]
    assert "".join(d["delta"].get("content", "") for d in deltas) == "Hello world!"
    assert not any(chunk.get("usage") for chunk in chunks)


def test_stream_headers(live):
    status, headers, data = live.request("POST", "/v1/completions", {"prompt": "x", "stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert data.endswith(b"data: [DONE]\n\n")


def test_usage_chunk_only_when_asked_and_without_choices(live):
    events = live.stream("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}})
    *chunks, usage, end = events
    assert end == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7
    assert usage["hybserve"]["cache"]["hit"] == 1
    assert all(chunk["usage"] is None for chunk in chunks)


def test_continuous_usage(live):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.stream("/v1/chat/completions", {**CHAT, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] if chunk["usage"] else None for chunk in events[:-1]]
    assert counts == [1, 2, 3, None, 4]  # none beside finish_reason, the whole in the usage chunk
    assert events[0]["usage"]["prompt_tokens"] == 3


def test_completion_prompt_forms(live):
    for prompt, kinds in (
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt([1, 2])]),
        ([[1], [2, 3]], [TokenPrompt([1]), TokenPrompt([2, 3])]),
    ):
        live.text.received.clear()
        status, _, body = live.post("/v1/completions", {"prompt": prompt})
        assert status == 200
        assert [s.prompt for s in live.text.submits()] == kinds
        assert [c["index"] for c in body["choices"]] == list(range(len(kinds)))
        assert body["usage"]["prompt_tokens"] == 3 * len(kinds)


def test_batch_times_n_indexes(live):
    events = live.stream("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2})
    texts: dict[int, str] = {}
    for chunk in events[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(4), "Hello wor")
    status, _, body = live.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2})
    assert status == 200
    assert [(c["index"], c["finish_reason"]) for c in body["choices"]] == [(i, "length") for i in range(4)]
    assert body["usage"]["completion_tokens"] == 8


def test_chat_logprobs_shape(live):
    status, _, body = live.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    assert status == 200
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " wor", "ld", "!"]
    assert content[0]["logprob"] == -9999.0  # -inf cannot stand in JSON
    assert content[1]["bytes"] == list(b" wor")
    assert [top["token"] for top in content[1]["top_logprobs"]] == ["t0", "t1"]


def test_completion_logprobs_shape(live):
    body = live.post("/v1/completions", {"prompt": "x", "logprobs": 1})[2]
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", " wor", "ld", "!"]
    assert logprobs["token_logprobs"] == [-9999.0, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][1] == {"t0": -1.0, " wor": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    events = live.stream("/v1/completions", {"prompt": "x", "logprobs": 0})
    assert events[1]["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]


def test_echo_asks_for_prompt_logprobs(live):
    live.post("/v1/completions", {"prompt": [[1, 2]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0})
    (submit,) = live.text.submits()
    assert submit.echo
    assert submit.sampling.prompt_logprobs == 1
    assert submit.sampling.greedy


def test_return_token_ids(live):
    body = live.post("/v1/chat/completions", {**CHAT, "return_token_ids": True})[2]
    assert body["prompt_token_ids"] == [5, 6, 7]
    assert body["choices"][0]["token_ids"] == [10, 11, 12, 13]
    batch = live.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "return_token_ids": True})[2]
    assert [c.get("prompt_token_ids") for c in batch["choices"]] == [[5, 6, 7], None, [5, 6, 7], None]
    events = live.stream("/v1/chat/completions", {**CHAT, "return_token_ids": True})
    assert [e.get("prompt_token_ids") for e in events[:-1]] == [[5, 6, 7], None, None, None]
    assert [e["choices"][0]["token_ids"] for e in events[:-1]] == [[10], [11], [12], [13]]


def test_models(live):
    body = live.get("/v1/models")[2]
    assert [m["id"] for m in body["data"]] == ["tiny", "org/tiny"]
    entry = body["data"][0]
    assert entry["max_model_len"] == 4096
    assert entry["hybserve"]["sampling_defaults"] == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert "secret" not in json.dumps(body)
    assert live.get("/v1/models/org/tiny")[2]["id"] == "org/tiny"
    status, _, body = live.get("/v1/models/nope")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_detokenize(live):
    body = live.post("/tokenize", {"prompt": "ab", "return_token_strs": True})[2]
    assert body == {"count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": ["a", "b"]}
    assert live.post("/tokenize", CHAT)[2]["count"] == 4
    assert live.post("/detokenize", {"tokens": [97, 98]})[2] == {"prompt": "ab"}
    assert live.post("/detokenize", {"tokens": [1000]})[0] == 400
    assert live.post("/tokenize", {})[0] == 400


def test_version_and_ids(live):
    assert live.get("/version")[2] == {"version": "0.1.0"}
    headers = live.post("/v1/chat/completions", CHAT, {"X-Request-Id": "abc-1"})[1]
    assert headers["x-request-id"] == "abc-1"
    headers = live.post("/v1/chat/completions", {**CHAT, "request_id": "body-1"}, {"X-Request-Id": "abc-1"})[1]
    assert headers["x-request-id"] == "body-1"


def test_f25_unknown_fields_are_listed_never_refused(live):
    body = {**CHAT, "user": "u", "metadata": {}, "tokenize": True, "bad\nname,": 1}
    body["messages"] = [{"role": "user", "content": "hi", "name": "", "refusal": "x"}]
    status, headers, _ = live.post("/v1/chat/completions", body)
    assert status == 200
    assert headers["x-hybserve-ignored"] == "user, metadata, tokenize, bad?name?, messages[].refusal"


def test_reasoning_effort_warns(live):
    headers = live.post("/v1/chat/completions", {**CHAT, "reasoning_effort": "high"})[1]
    assert "reasoning_effort high" in headers["x-hybserve-warning"]
    live.text.received.clear()
    live.post("/v1/chat/completions", {**CHAT, "reasoning_effort": "none"})
    assert json.loads(live.text.submits()[0].prompt.template_kwargs_json) == {"enable_thinking": False}


def test_admission_errors_keep_their_status(live):
    live.text.refusal = ErrorBody("full", "server_error", "queue_full", None, 503, 3)
    for stream in (False, True):
        status, headers, body = live.post("/v1/chat/completions", {**CHAT, "stream": stream})
        assert (status, headers["retry-after"]) == (503, "3")
        assert body["error"] == {"message": "full", "type": "server_error", "param": None, "code": "queue_full"}


def test_one_refused_prompt_of_a_batch_cancels_the_rest(live):
    original = live.text.generate

    async def refuse_second(submit: Submit) -> None:
        live.text.refusal = ErrorBody("no", "server_error", "queue_full", None, 503) if submit.uid % 2 == 0 else None
        await original(submit)

    live.text.generate = refuse_second
    live.text.hold_at = 1
    status, _, _ = live.post("/v1/completions", {"prompt": ["a", "b"], "stream": True})
    assert status == 503
    live.wait(lambda: len(live.text.cancelled) == 1)
    live.text.released.set()


def test_failure_in_a_stream_is_an_event_and_done(live):
    live.text.fail_after = (2, ErrorBody("bad numbers", "server_error", "numerical_error", None, 500))
    events = live.stream("/v1/chat/completions", CHAT)
    assert events[-2]["error"]["code"] == "numerical_error"
    assert events[-1] == "[DONE]"
    status, _, body = live.post("/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"]) == (500, "numerical_error")


def test_pings_keep_a_silent_stream_open(serve):
    live = serve(sse_ping=0.1)
    live.text.hold_at = 1
    live.loop.call_soon_threadsafe(live.loop.call_later, 0.5, live.text.released.set)
    events = live.stream("/v1/chat/completions", CHAT)
    assert events.count(": ping") >= 2
    assert events[-1] == "[DONE]"
