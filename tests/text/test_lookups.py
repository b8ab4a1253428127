"""Questions about prompts and the cache: rendering, probing, flushing."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from hybserve.core.errors import invalid_value
from hybserve.core.messages import (
    Cancel,
    ChatPrompt,
    Drain,
    Failed,
    Flush,
    Flushed,
    Generate,
    Probe,
    Probed,
    Render,
    Rendered,
    Submit,
    TextPrompt,
    TokenPrompt,
)
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import CacheTruth, ServingFacts
from hybserve.text.core import TextCore
from hybserve.text.jobs import Decode, Decoded, Encode, Encoded, Refused
from hybserve.text.lookups import INLINE_IDS
from hybserve.text.tokenize import Tokenizer

TRUTH = CacheTruth(kv_hit=128, state_hit=64, hit=64, reason="no_checkpoint", at=64, device=64)
CHAT = ChatPrompt(json.dumps([{"role": "user", "content": "hi"}]).encode())


@pytest.fixture
def core(make_facts: Callable[..., ServingFacts], tokenizers: dict[str, Tokenizer]) -> TextCore:
    core = TextCore(make_facts(), tokenizers["byte-level"], False, lambda: 77)
    core.apis = {0, 1}
    return core


def take(core: TextCore, api: int = 0) -> list[Any]:
    return list(core.to_apis.pop(api, []))


def sent(core: TextCore) -> list[Any]:
    messages, core.to_engine = core.to_engine, []
    return messages


def test_a_rendered_text_with_what_the_cache_has_of_it(core: TextCore, tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["byte-level"].encode("The fox", True)
    core.from_api(1, [Render(7, TextPrompt("The fox"), tenant="t", cache_salt="s")])
    assert sent(core) == [Probe(7, ids, "t", "s")]
    assert take(core, 1) == []
    assert not core.idle
    core.from_engine([Probed(7, TRUTH)])
    assert take(core, 1) == [Rendered(7, "The fox", ids, TRUTH)]
    assert core.idle


def test_a_conversation_is_rendered_by_the_worker(core: TextCore) -> None:
    core.from_api(0, [Render(1, CHAT, False), Render(2, CHAT, False)])
    assert core.jobs == [Encode(1, CHAT, False, return_text=True), Encode(2, CHAT, False, return_text=True)]
    core.from_worker(Encoded(1, [5, 6], text="<user>hi"))
    core.from_worker(Refused(2, invalid_value("no", "messages").body))
    assert sent(core) == [Probe(1, [5, 6], "", "")]
    core.from_engine([Probed(1, TRUTH)])
    refused, rendered = take(core)
    assert (refused.uid, refused.error.param) == (2, "messages")
    assert rendered == Rendered(1, "<user>hi", [5, 6], TRUTH)
    assert core.idle


def test_token_prompts_are_shown_as_text(make_facts: Any, tokenizers: dict[str, Tokenizer]) -> None:
    core = TextCore(make_facts(max_seq_len=1 << 17), tokenizers["byte-level"], False, lambda: 77)
    ids = tokenizers["byte-level"].encode("<|im_start|>The 🙂", False)
    long = ids * (INLINE_IDS // len(ids) + 1)
    core.from_api(0, [Render(1, TokenPrompt(ids)), Render(2, TokenPrompt(long))])
    assert core.jobs == [Decode(2, long)]
    core.from_worker(Decoded(2, "long"))
    assert sent(core) == [Probe(1, ids, "", ""), Probe(2, long, "", "")]
    core.from_engine([Probed(2, TRUTH), Probed(1, CacheTruth())])
    assert take(core) == [Rendered(2, "long", long, TRUTH), Rendered(1, "<|im_start|>The 🙂", ids, CacheTruth())]


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (TextPrompt(""), "invalid_value"),
        (TokenPrompt([5, 9_999_999]), "invalid_value"),
        (TokenPrompt([5] * 512), "context_length_exceeded"),
        (TextPrompt("x" * 9_000_000), "context_length_exceeded"),
        (ChatPrompt(b"[]", template="x"), "unsupported_parameter"),
    ],
)
def test_what_could_not_be_generated_from_is_refused(core: TextCore, prompt: Any, code: str) -> None:
    core.from_api(0, [Render(1, prompt)])
    (failed,) = take(core)
    assert (failed.uid, failed.error.code, failed.error.status) == (1, code, 400)
    assert (sent(core), core.jobs, core.idle) == ([], [], True)


def test_a_conversation_too_long_for_the_context(core: TextCore) -> None:
    core.from_api(0, [Render(1, CHAT)])
    core.from_worker(Encoded(1, [5] * 512, text="long"))
    (failed,) = take(core)
    assert failed.error.code == "context_length_exceeded"
    assert (sent(core), core.idle) == ([], True)


def test_flush_goes_through(core: TextCore) -> None:
    core.from_api(1, [Flush(3)])
    assert sent(core) == [Flush(3)]
    core.from_engine([Flushed(3, 10, 2)])
    assert take(core, 1) == [Flushed(3, 10, 2)]
    assert core.idle


def test_F11_cancelled_questions_are_forgotten_at_every_stage(core: TextCore) -> None:
    core.from_api(0, [Render(1, CHAT), Render(2, TextPrompt("x")), Flush(3)])
    sent(core)
    core.from_api(0, [Cancel(1), Cancel(2), Cancel(3)])
    assert core.withdrawn == [1]  # the engine's answers are cheap and simply ignored
    assert core.idle
    core.from_worker(Encoded(1, [5], text="x"))
    core.from_engine([Probed(2, TRUTH), Flushed(3, 1, 1)])
    assert (take(core), sent(core)) == ([], [])


def test_a_lost_api_takes_its_questions_along(core: TextCore) -> None:
    core.from_api(0, [Render(1, CHAT), Render(2, TextPrompt("x"))])
    core.api_lost(0)
    assert core.withdrawn == [1]
    assert core.idle


def test_F70_a_lost_engine_ends_what_needs_it_and_only_that(core: TextCore) -> None:
    core.from_api(0, [Render(1, CHAT), Render(2, TextPrompt("x")), Flush(3)])
    core.engine_lost("The engine stopped.")
    assert [(m.uid, m.error.code) for m in take(core)] == [(uid, "engine_error") for uid in (1, 2, 3)]
    core.from_worker(Encoded(1, [5], text="x"))
    core.from_api(0, [Render(4, TextPrompt("x")), Flush(5)])
    assert [(m.uid, m.error.code) for m in take(core)] == [(4, "engine_unhealthy"), (5, "engine_unhealthy")]


def test_F17_nothing_new_while_draining(core: TextCore) -> None:
    core.from_api(0, [Render(1, TextPrompt("x")), Drain(), Render(2, TextPrompt("x")), Flush(3)])
    assert [type(message) for message in sent(core)] == [Probe, Drain]
    assert [(m.uid, m.error.code) for m in take(core)] == [(2, "draining"), (3, "draining")]
    core.from_engine([Probed(1, TRUTH)])
    assert isinstance(take(core)[0], Rendered)


def test_shutting_down_ends_questions(core: TextCore) -> None:
    core.from_api(0, [Render(1, TextPrompt("x")), Flush(2)])
    core.end_all(invalid_value("bye").body)
    assert [type(message) for message in take(core)] == [Failed, Failed]
    assert core.idle


def test_anchors_reach_the_scheduler(core: TextCore) -> None:
    core.from_api(0, [Submit(1, CHAT, SamplingParams()), Submit(2, TextPrompt("x"), SamplingParams())])
    (job,) = core.jobs
    assert job == Encode(1, CHAT, True, anchors=True)
    core.from_worker(Encoded(1, [5, 6, 7, 8], [2, 3]))
    plain, chat = sent(core)
    assert isinstance(plain, Generate)
    assert isinstance(chat, Generate)
    assert (plain.anchors, chat.anchors) == ([], [2, 3])
