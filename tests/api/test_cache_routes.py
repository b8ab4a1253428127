"""Rendering and flushing over a live server with a scripted text role, and the cache in the log line."""

import hashlib
import json
import logging

import pytest

from hybserve.api.settings import from_deployment
from hybserve.config.deployment import Deployment
from hybserve.core.errors import context_length_exceeded
from hybserve.core.messages import ChatPrompt, Flush, Render, TextPrompt, TokenPrompt

CHAT = {"messages": [{"role": "developer", "content": "hi"}]}
RENDER = "/v1/chat/completions/render"


def digest(key):
    return hashlib.sha256(key).digest()


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def renders(live):
    return [message for message in live.text.received if isinstance(message, Render)]


def test_render_chat(live):
    body = {**CHAT, "cache_salt": "s", "stream": True, "max_tokens": 9, "hint": 1, "request_id": "mine"}
    status, headers, answer = live.post(RENDER, body)
    assert status == 200
    assert answer == {
        "text": "<user>hi",
        "token_ids": [5, 6, 7],
        "tokens": 3,
        "hybserve": {
            "cache": {
                "kv_hit": 128, "state_hit": 64, "hit": 64, "reason": "no_checkpoint", "at": 64,
                "tiers": {"device": 64, "host": 0, "file": 0},
            }
        },
    }  # fmt: skip
    assert headers["x-hybserve-ignored"] == "hint"
    assert headers["x-request-id"] == "mine"
    (render,) = renders(live)
    assert isinstance(render.prompt, ChatPrompt)
    assert json.loads(render.prompt.messages_json) == [{"role": "system", "content": "hi"}]
    assert (render.add_special_tokens, render.cache_salt, render.tenant) == (False, "s", "")
    assert not live.text.submits()


def test_render_is_the_same_prompt_that_the_chat_route_submits(live):
    body = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}, "cache_salt": "s", "add_special_tokens": True}
    live.post(RENDER, body)
    live.post("/v1/chat/completions", body)
    (render,), (submit,) = renders(live), live.text.submits()
    for key in ("prompt", "add_special_tokens", "tenant", "cache_salt"):
        assert getattr(render, key) == getattr(submit, key)


def test_render_plain_prompts(live):
    for prompt, expected in (("a", TextPrompt("a")), ([1, 2], TokenPrompt([1, 2])), (["b"], TextPrompt("b"))):
        status, _, answer = live.post("/v1/completions/render", {"prompt": prompt})
        assert (status, answer["tokens"]) == (200, 3)
        assert renders(live)[-1].prompt == expected
        assert renders(live)[-1].add_special_tokens is True


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (RENDER, {}, 400, "messages"),
        (RENDER, {"messages": []}, 400, "messages"),
        (RENDER, {**CHAT, "temperature": "hot"}, 400, "temperature"),
        (RENDER, {**CHAT, "model": "other"}, 404, "model"),
        (RENDER, {**CHAT, "cache_salt": ""}, 400, "cache_salt"),
        (RENDER, {**CHAT, "tools": [{}]}, 400, "tools"),
        ("/v1/completions/render", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/v1/completions/render", {"prompt": [[5], [6]]}, 400, "prompt"),
        ("/v1/completions/render", {"prompt": [5_000_000]}, 400, "prompt[0]"),
    ],
)
def test_render_refuses_what_generation_refuses(live, path, body, status, param):
    got, _, answer = live.post(path, body)
    assert (got, answer["error"]["param"]) == (status, param)
    assert not renders(live)


def test_what_text_refuses_is_the_answer(live):
    live.text.refusal = context_length_exceeded(4096, 5000, 1).body
    status, _, answer = live.post(RENDER, CHAT)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_render_and_flush_while_loading(serve):
    live = serve(ready=False, loopback=True)
    for path, body in ((RENDER, CHAT), ("/flush_cache", None)):
        status, headers, answer = live.post(path, body)
        assert (status, answer["error"]["code"]) == (503, "model_loading")
        assert headers["retry-after"]


def test_F40_tenants_and_salts_of_renders(serve):
    live = serve(key_digests=(digest(b"one"), digest(b"two")))
    for key in ("one", "two", "one"):
        assert live.post(RENDER, {**CHAT, "cache_salt": "s"}, bearer(key))[0] == 200
    first, second, third = (render.tenant for render in renders(live))
    assert first == third != second
    assert live.post(RENDER, CHAT)[0] == 401


# /flush_cache


def test_flush_on_an_open_loopback_server(serve):
    live = serve(loopback=True)
    assert live.post("/flush_cache", None)[::2] == (200, {"pages": 12, "states": 3})
    assert live.post("//flush_cache/", {"any": "body"})[0] == 200
    assert live.get("/flush_cache")[0] == 405
    assert sum(isinstance(message, Flush) for message in live.text.received) == 2


def test_F08_flush_on_an_open_server_that_others_can_reach(live):
    status, _, answer = live.post("/flush_cache", None)
    assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert not live.text.received


@pytest.mark.parametrize("loopback", [True, False])
def test_F08_only_the_admin_key_flushes(serve, loopback):
    keys = {"key_digests": (digest(b"user"), digest(b"root")), "admin_digests": (digest(b"root"),)}
    live = serve(loopback=loopback, **keys)
    for path in ("/flush_cache", "//flush_cache", "/flush_cache/"):
        status, headers, answer = live.post(path, None)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"]
        assert live.post(path, None, bearer("wrong"))[0] == 401
        status, _, answer = live.post(path, None, bearer("user"))
        assert (status, answer["error"]["type"]) == (403, "permission_error")
        assert "server.admin_api_key_env" in answer["error"]["message"]
        assert not live.text.received
    assert live.post("/flush_cache", None, bearer("root"))[0] == 200
    assert live.post("/v1/chat/completions", CHAT, bearer("root"))[0] == 200


def test_F08_user_keys_alone_open_no_admin_route(serve):
    live = serve(key_digests=(digest(b"user"),), loopback=True)
    assert live.post("/flush_cache", None, bearer("user"))[0] == 403


def test_settings_tell_admins_and_loopback():
    def settings(**server):
        return from_deployment(Deployment.build({"server": server}), {"KEY": "user", "ADMIN": "root"})

    both = settings(api_key_env="KEY", admin_api_key_env="ADMIN", host="0.0.0.0")
    assert (both.admin_digests, both.loopback) == ((digest(b"root"),), False)
    assert settings(api_key_env="KEY").admin_digests == ()
    for host, expected in (("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)):
        assert settings(host=host, insecure=True).loopback is expected


# the log line


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_line_tells_what_the_cache_did(live, caplog, stream):
    with caplog.at_level(logging.INFO, logger="hybserve"):
        live.request("POST", "/v1/chat/completions", {**CHAT, "stream": stream})
        live.post(RENDER, CHAT)
        live.wait(lambda: sum(hasattr(record, "fields") for record in caplog.records) == 2)
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    told = [{key: line[key] for key in ("kv_hit", "state_hit", "hit", "reason")} for line in lines]
    assert told == [
        {"kv_hit": 2, "state_hit": 0, "hit": 1, "reason": "no_checkpoint"},
        {"kv_hit": 128, "state_hit": 64, "hit": 64, "reason": "no_checkpoint"},
    ]
