import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hybserve.core.errors import engine_error, invalid_value
from hybserve.core.messages import (
    Accepted,
    Cancel,
    ChatPrompt,
    Delta,
    Detokenize,
    Detokenized,
    Done,
    Drain,
    Failed,
    Fatal,
    Finished,
    Generate,
    Heartbeat,
    Loading,
    MetricsSnapshot,
    PromptLogprobs,
    Ready,
    StopAt,
    Submit,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenPrompt,
    Tokens,
)
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import CacheTruth, Ended, ServingFacts, Timing, TokenLogprobs
from hybserve.text.core import TextCore
from hybserve.text.detokenize import Detokenizer
from hybserve.text.jobs import Decode, Decoded, Encode, Encoded, Refused
from hybserve.text.prepare import INLINE_TEXT, INLINE_TURN
from hybserve.text.tokenize import Tokenizer

NO, STOP, LENGTH = int(Ended.NO), int(Ended.STOP), int(Ended.LENGTH)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_core(
    make_facts: Callable[..., ServingFacts], tokenizers: dict[str, Tokenizer], clock: Clock
) -> Callable[..., TextCore]:
    def make(kind: str = "byte-level", allow_template: bool = False, **facts: Any) -> TextCore:
        core = TextCore(make_facts(kind, **facts), tokenizers[kind], allow_template, lambda: 77, clock)
        core.apis = {0, 1}
        return core

    return make


@pytest.fixture
def core(make_core: Callable[..., TextCore]) -> TextCore:
    return make_core()


def submit(uid: int, prompt: Any = "Hello", **fields: Any) -> Submit:
    names = set(SamplingParams.__struct_fields__)
    sampling = SamplingParams(**{key: fields.pop(key) for key in list(fields) if key in names and key != "seed"})
    if isinstance(prompt, str):
        prompt = TextPrompt(prompt)
    elif isinstance(prompt, list):
        prompt = TokenPrompt(prompt)
    return Submit(uid, prompt, sampling, **fields)


def take(core: TextCore, api: int = 0) -> list[Any]:
    return list(core.to_apis.pop(api, []))


def only_error(core: TextCore, api: int = 0) -> Any:
    (message,) = take(core, api)
    assert isinstance(message, Failed)
    return message.error


def feed(core: TextCore, uid: int, tokens: Sequence[int], last: int = NO, choice: int = 0) -> list[Any]:
    for position, token in enumerate(tokens, 1):
        ended = last if position == len(tokens) else NO
        core.from_engine([Tokens([uid], [choice], [token], [ended], [])])
    return take(core)


def finish(core: TextCore, uid: int) -> list[Any]:
    core.from_engine([Finished(uid, CacheTruth(hit=4), Timing(queue=1.0))])
    return take(core)


def chat_prompt(text: str, template: str | None = None) -> ChatPrompt:
    return ChatPrompt(json.dumps([{"role": "user", "content": text}]).encode(), template=template)


def text_of(messages: Sequence[Any]) -> str:
    return "".join(message.text for message in messages if isinstance(message, Delta))


# The way in


def test_a_short_text_goes_straight_to_the_scheduler(
    core: TextCore, tokenizers: dict[str, Tokenizer], clock: Clock
) -> None:
    eos = tokenizers["byte-level"].vocab["<|im_end|>"]
    core.from_api(0, [submit(5, "Hello", stop_ids=(7,), tenant="t", cache_salt="s", priority=3, timeout=9.0, n=2)])
    (generate,) = core.to_engine
    assert isinstance(generate, Generate)
    assert generate.prompt == tokenizers["byte-level"].encode("Hello", True)
    assert (generate.tenant, generate.cache_salt, generate.priority, generate.timeout) == ("t", "s", 3, 9.0)
    assert (generate.n, generate.arrival) == (2, clock.now)
    assert generate.sampling.stop_ids == (7, eos)
    assert (generate.sampling.seed, generate.sampling.max_tokens) == (77, 16)


def test_seed_ignore_eos_and_filling_the_context(core: TextCore) -> None:
    core.from_api(0, [submit(1, [5, 6, 7], seed=3, ignore_eos=True, max_tokens=0)])
    (generate,) = core.to_engine
    assert isinstance(generate, Generate)
    assert (generate.sampling.seed, generate.sampling.stop_ids, generate.sampling.max_tokens) == (3, (), 509)


def test_conversations_and_long_texts_go_to_the_worker(core: TextCore) -> None:
    long = "x " * INLINE_TEXT
    core.from_api(0, [submit(1, chat_prompt("hi")), submit(2, long, add_special_tokens=False)])
    assert core.jobs == [Encode(1, chat_prompt("hi"), True, anchors=True), Encode(2, TextPrompt(long), False)]
    core.from_worker(Encoded(1, [5, 6]))
    core.from_worker(Refused(2, invalid_value("no", "prompt").body))
    (generate,) = core.to_engine
    assert isinstance(generate, Generate)
    assert generate.prompt == [5, 6]
    assert only_error(core).param == "prompt"


def test_F19_a_batch_of_short_texts_is_mostly_the_workers(core: TextCore) -> None:
    text = "x " * 500
    core.from_api(0, [submit(uid, text) for uid in range(100)])
    on_the_spot = sum(len(text) for message in core.to_engine if isinstance(message, Generate))
    on_the_spot += sum(len(text) for message in take(core) if isinstance(message, Failed))
    assert 0 < on_the_spot <= INLINE_TURN
    assert len(core.jobs) == 100 - on_the_spot // len(text)


def test_F31_too_many_bytes_are_refused_before_any_encoding(core: TextCore) -> None:
    core.from_api(0, [submit(1, "a" * 50_000_000)])
    assert core.jobs == []
    error = only_error(core)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    core.from_api(0, [submit(2, chat_prompt("a" * 1_000_000))])
    assert core.jobs == []
    assert only_error(core).code == "context_length_exceeded"


@pytest.mark.parametrize(("prompt", "max_tokens"), [(512, 1), (512, 0), (600, 0), (500, 13), (1, 2**63 - 1)])
def test_F31_what_does_not_fit_the_context(core: TextCore, prompt: int, max_tokens: int) -> None:
    core.from_api(0, [submit(1, [5] * prompt, max_tokens=max_tokens)])
    error = only_error(core)
    assert error.code == "context_length_exceeded"
    assert "512" in error.message
    assert str(prompt) in error.message
    assert core.to_engine == []


def test_the_last_token_of_the_context_is_usable(core: TextCore) -> None:
    core.from_api(0, [submit(1, [5] * 511, max_tokens=1)])
    assert len(core.to_engine) == 1


@pytest.mark.parametrize("prompt", ["", []])
def test_F27_an_empty_prompt(make_core: Callable[..., TextCore], prompt: Any) -> None:
    core = make_core()
    core.from_api(0, [submit(1, prompt)])
    assert (only_error(core).status, core.to_engine) == (400, [])
    with_bos = make_core("llama", eos=("</s>",))
    with_bos.from_api(0, [submit(1, prompt, add_special_tokens=False)])
    (generate,) = with_bos.to_engine
    assert isinstance(generate, Generate)
    assert generate.prompt == [1]


@pytest.mark.parametrize("token", [-1, 1024, 2**40, -(2**62)])
def test_F30_token_ids_that_the_embedding_lacks(core: TextCore, token: int) -> None:
    cases = {
        "prompt": submit(1, [5, token, 6]),
        "stop_token_ids": submit(2, stop_ids=(5, token)),
        "logit_bias": submit(3, logit_bias=((5, 1.0), (token, 1.0))),
        "tokens": Detokenize(4, [5, token]),
    }
    for param, message in cases.items():
        core.from_api(0, [message])
        error = only_error(core)
        assert (error.status, error.code, error.param) == (400, "invalid_value", param)
        assert str(token) in error.message
    assert core.to_engine == []
    assert core.idle


def test_F30_the_highest_id_of_the_embedding_passes(core: TextCore) -> None:
    core.from_api(0, [submit(1, [1023], stop_ids=(1023,), logit_bias=((1023, 1.0),))])
    assert len(core.to_engine) == 1


def test_F34_a_template_in_a_request_needs_leave(make_core: Callable[..., TextCore]) -> None:
    core = make_core()
    core.from_api(0, [submit(1, chat_prompt("hi", "{{ 1 }}"))])
    assert only_error(core).code == "unsupported_parameter"
    allowed = make_core(allow_template=True)
    allowed.from_api(0, [submit(1, chat_prompt("hi", "{{ 1 }}"))])
    assert len(allowed.jobs) == 1


def test_F26_half_a_surrogate_pair(core: TextCore) -> None:
    core.from_api(0, [submit(1, "ab\ud800")])
    assert "character 2" in only_error(core).message


def test_draining_takes_nothing_new_and_finishes_the_rest(core: TextCore) -> None:
    core.from_api(0, [submit(1), submit(2, chat_prompt("hi")), Drain()])
    assert core.to_engine[-1] == Drain()
    core.from_api(0, [submit(3)])
    assert only_error(core).code == "draining"
    core.from_worker(Encoded(2, [5]))
    assert only_error(core).code == "draining"
    assert finish_normally(core, 1)[-1].completion_tokens == 1


def finish_normally(core: TextCore, uid: int) -> list[Any]:
    return feed(core, uid, [5], LENGTH) + finish(core, uid)


def test_a_request_whose_time_runs_out_before_the_scheduler(core: TextCore, clock: Clock) -> None:
    core.from_api(0, [submit(1, chat_prompt("hi"), timeout=5.0), submit(2, chat_prompt("hi")), submit(3, timeout=5.0)])
    clock.now += 6
    core.tick()
    assert only_error(core).status == 504
    assert core.withdrawn == [1]
    core.from_worker(Encoded(1, [5]))
    assert [message.uid for message in core.to_engine if isinstance(message, Generate)] == [3]


# The way out


def test_accepted_carries_the_prompt_only_when_asked(core: TextCore) -> None:
    core.from_api(0, [submit(1, [5, 6]), submit(2, [5, 6], return_token_ids=True), submit(3, [5, 6], echo=True)])
    core.from_engine([Accepted(1), Accepted(2), Accepted(3), Accepted(9)])
    assert take(core) == [Accepted(1, 2), Accepted(2, 2, [5, 6]), Accepted(3, 2, [5, 6])]


def test_end_of_sequence_is_silent_but_counts(core: TextCore, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("fox dog", False)
    core.from_api(0, [submit(1, return_token_ids=True)])
    deltas = feed(core, 1, [*ids, tokenizer.vocab["<|im_end|>"]], STOP)
    assert text_of(deltas) == "fox dog"
    assert [delta.finish_reason for delta in deltas] == [None] * len(ids) + ["stop"]
    assert [delta.token_ids for delta in deltas][-1] == [tokenizer.vocab["<|im_end|>"]]
    assert sum(delta.tokens for delta in deltas) == len(ids) + 1
    (done,) = finish(core, 1)
    assert done == Done(1, 3, len(ids) + 1, CacheTruth(hit=4), Timing(queue=1.0)) or done.completion_tokens
    assert done.completion_tokens == len(ids) + 1
    assert core.idle


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop_text", ["<|im_end|>", "<|endoftext|>", "Z"])
def test_a_clients_stop_token_is_shown_only_when_included(
    core: TextCore, tokenizers: dict[str, Tokenizer], include: bool, stop_text: str
) -> None:
    tokenizer = tokenizers["byte-level"]
    token = tokenizer.vocab[stop_text]
    core.from_api(0, [submit(1, stop_ids=(token,), include_stop=include)])
    deltas = feed(core, 1, [*tokenizer.encode("fox", False), token], STOP)
    assert text_of(deltas) == "fox" + (stop_text if include else "")
    own = submit(2, include_stop=include)
    core.from_api(0, [own])
    assert text_of(feed(core, 2, [tokenizer.vocab["<|im_end|>"]], STOP)) == ""


def test_a_stop_string_ends_the_choice_and_tells_the_scheduler(
    core: TextCore, tokenizers: dict[str, Tokenizer]
) -> None:
    ids = tokenizers["byte-level"].encode("The dog. The end", False)
    core.from_api(0, [submit(1, stop=("g. T",))])
    core.to_engine.clear()
    deltas = feed(core, 1, ids, LENGTH)
    assert text_of(deltas) == "The do"
    assert deltas[-1].finish_reason == "stop"
    assert core.to_engine == [StopAt(1, 0, len(deltas))]
    assert finish(core, 1)[0].completion_tokens == len(deltas) < len(ids)


def test_a_stop_string_completed_by_the_last_token_wins_over_the_length(
    core: TextCore, tokenizers: dict[str, Tokenizer]
) -> None:
    ids = tokenizers["byte-level"].encode("The dog", False)
    core.from_api(0, [submit(1, stop=("dog",)), submit(2, stop=("dog and",)), submit(3, stop=("\ufffd",))])
    core.to_engine.clear()
    first, second = feed(core, 1, ids, LENGTH), feed(core, 2, ids, LENGTH)
    assert (text_of(first), first[-1].finish_reason) == ("The ", "stop")
    assert (text_of(second), second[-1].finish_reason) == ("The dog", "length")
    half = [Detokenizer(tokenizers["byte-level"]).token_bytes(i) for i in range(420)].index(b"\xf0")
    third = feed(core, 3, [*ids, half], LENGTH)
    assert (text_of(third), third[-1].finish_reason) == ("The dog", "stop")
    assert core.to_engine == []  # it has ended them already


def test_min_tokens_keeps_stop_strings_off(core: TextCore, tokenizers: dict[str, Tokenizer]) -> None:
    token = tokenizers["byte-level"].vocab["a"]
    core.from_api(0, [submit(1, stop=("aa",), min_tokens=4, max_tokens=9)])
    deltas = feed(core, 1, [token] * 9, LENGTH)
    assert (text_of(deltas), len(deltas)) == ("aaa", 5)


def test_logprobs_carry_text_bytes_and_offsets(core: TextCore, tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["byte-level"])
    bytes_of = {detokenizer.token_bytes(i): i for i in range(420)}
    emoji = [bytes_of[bytes([byte])] for byte in "🙂".encode()]
    fox = bytes_of[b"f"]
    core.from_api(0, [submit(1, logprobs=2, max_tokens=99)])
    entry = TokenLogprobs(float("-inf"), (fox, emoji[0]), (-0.5, float("nan")))
    for token in (fox, *emoji, fox):
        core.from_engine([Tokens([1], [0], [token], [NO], [entry])])
    details = [delta.logprobs[0] for delta in take(core)]
    assert [detail.offset for detail in details] == [0, 1, 1, 1, 1, 2]
    assert [detail.bytes for detail in details] == [b"f", *[bytes([byte]) for byte in "🙂".encode()], b"f"]
    assert (details[0].logprob, details[0].text) == (-9999.0, "f")
    assert details[0].top == (("f", b"f", -0.5), ("\ufffd", b"\xf0", -9999.0))


def test_echo_shows_the_prompt_once_for_each_choice(core: TextCore, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    prompt = tokenizer.encode("The fox zigzags", False)
    assert len(prompt) > 2
    core.from_api(0, [submit(1, "The fox zigzags", echo=True, n=2, logprobs=0, prompt_logprobs=1)])
    entries = [TokenLogprobs(-float(i), (prompt[i],), (-float(i),)) for i in range(1, len(prompt))]
    core.from_engine([PromptLogprobs(1, 1, entries[:1]), PromptLogprobs(1, 2, entries[1:])])
    dog = tokenizer.encode(" dog", False)
    for choice in (0, 1):
        for token in dog:
            core.from_engine([Tokens([1], [choice], [token], [NO], [TokenLogprobs(-1.0)])])
    messages = take(core)
    for choice in (0, 1):
        deltas = [message for message in messages if message.choice == choice]
        assert text_of(deltas) == "The fox zigzags dog"
        details = [detail for delta in deltas for detail in delta.logprobs]
        assert [detail.id for detail in details] == prompt + dog
        assert [detail.logprob for detail in details] == [
            None,
            *(-float(i) for i in range(1, len(prompt))),
            *[-1.0] * len(dog),
        ]
        assert [detail.offset for detail in details] == [
            len(tokenizer.backend.decode((prompt + dog)[:i])) for i in range(len(details))
        ]


def test_echo_hides_what_the_tokenizer_added(
    make_core: Callable[..., TextCore], tokenizers: dict[str, Tokenizer]
) -> None:
    core, tokenizer = make_core("llama", eos=("</s>",)), tokenizers["llama"]
    fox = tokenizer.encode(" fox", False)[-1:]
    for uid, prompt in enumerate(("The fox", "", "<s>The fox", [1, *tokenizer.encode("The fox", False)]), 1):
        core.from_api(0, [submit(uid, prompt, echo=True, add_special_tokens=uid != 3)])
    shown = [text_of(feed(core, uid, fox)) for uid in (1, 2, 3, 4)]
    tail = tokenizer.backend.decode(tokenizer.encode("The fox", False) + fox)
    assert shown[0] == tail
    assert shown[1] == tokenizer.backend.decode(fox)
    assert shown[2].startswith("<s>")
    assert shown[3].startswith("<s>")


def test_the_engines_failure_is_the_clients(core: TextCore) -> None:
    core.from_api(1, [submit(1)])
    error = engine_error("the state was not finite").body
    core.from_engine([Failed(1, error), Failed(1, error), Tokens([1], [0], [5], [NO], [])])
    assert take(core, 1) == [Failed(1, error)]


def test_finished_too_early_is_a_failure_not_a_truncated_success(core: TextCore) -> None:
    core.from_api(0, [submit(1, n=2)])
    feed(core, 1, [5], LENGTH)
    (failed,) = finish(core, 1)
    assert (failed.error.status, failed.error.code) == (500, "engine_error")


def test_cancel_in_every_state(core: TextCore) -> None:
    core.from_api(0, [submit(1), submit(2, chat_prompt("hi")), Tokenize(3, chat_prompt("hi")), Cancel(9)])
    core.to_engine.clear()
    core.from_api(0, [Cancel(1), Cancel(2), Cancel(3), Cancel(1)])
    assert core.to_engine == [Cancel(1)]
    assert core.withdrawn == [2, 3]
    core.from_worker(Encoded(2, [5]))
    core.from_worker(Encoded(3, [5]))
    core.from_engine([Accepted(1), PromptLogprobs(1, 1, []), Finished(1, CacheTruth(), Timing())])
    assert feed(core, 1, [5, 6]) == []
    assert core.idle
    assert core.to_engine == [Cancel(1)]


def test_a_lost_api_takes_its_requests_along(core: TextCore) -> None:
    core.from_api(0, [submit(1), Tokenize(2, chat_prompt("x"))])
    core.from_api(1, [submit(3)])
    core.to_engine.clear()
    core.api_lost(0)
    assert (core.to_engine, core.withdrawn) == ([Cancel(1)], [2])
    assert finish_normally_at(core, 3, 1)[-1].uid == 3
    core.broadcast([Heartbeat("engine", 1, False)])
    assert set(core.to_apis) == {1}


def finish_normally_at(core: TextCore, uid: int, api: int) -> list[Any]:
    core.from_engine([Tokens([uid], [0], [5], [LENGTH], []), Finished(uid, CacheTruth(), Timing())])
    return take(core, api)


def test_a_lost_engine_ends_every_request_once_and_refuses_new_ones(core: TextCore) -> None:
    core.from_api(0, [submit(1), submit(2, chat_prompt("hi"))])
    core.engine_lost("The engine stopped.")
    assert [(m.uid, m.error.code) for m in take(core)] == [(1, "engine_error"), (2, "engine_error")]
    core.from_worker(Encoded(2, [5]))
    core.from_api(0, [submit(3)])
    error = only_error(core)
    assert (error.status, error.code) == (503, "engine_unhealthy")


def test_upstream_messages_reach_every_api(core: TextCore) -> None:
    messages = [Loading("weights", 0.5), Ready("engine"), MetricsSnapshot("engine", {}, {}, {}), Fatal("engine", "x")]
    core.from_engine(messages)
    assert take(core, 0) == take(core, 1) == messages


def test_one_frame_per_api_for_a_step(core: TextCore) -> None:
    core.from_api(0, [submit(uid) for uid in (1, 2, 3)])
    core.from_api(1, [submit(4)])
    core.from_engine([Tokens([1, 2, 3, 4], [0] * 4, [5] * 4, [NO] * 4, [])])
    assert {api: len(messages) for api, messages in core.to_apis.items()} == {0: 3, 1: 1}


# /tokenize and /detokenize


def test_tokenize(core: TextCore, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("The fox", True)
    core.from_api(0, [Tokenize(1, TextPrompt("The fox")), Tokenize(2, TextPrompt("The fox"), return_token_strs=True)])
    strings = [tokenizer.backend.id_to_token(token) for token in ids]
    assert take(core) == [Tokenized(1, ids), Tokenized(2, ids, strings)]
    core.from_api(1, [Tokenize(3, chat_prompt("x"), False), Tokenize(4, TextPrompt("y" * 9_000_000))])
    assert core.jobs == [Encode(3, chat_prompt("x"), False)]
    core.from_worker(Encoded(3, [5]))
    failed, answered = take(core, 1)
    assert answered == Tokenized(3, [5])
    assert failed.error.code == "context_length_exceeded"
    assert core.idle


def test_detokenize(core: TextCore, tokenizers: dict[str, Tokenizer]) -> None:
    text = "<|im_start|>The fox 🙂"
    ids = tokenizers["byte-level"].encode(text, False)
    core.from_api(0, [Detokenize(1, ids), Detokenize(2, []), Detokenize(3, ids * 5000)])
    assert take(core) == [Detokenized(1, text), Detokenized(2, "")]
    assert core.jobs == [Decode(3, ids * 5000)]
    core.from_worker(Decoded(3, "long"))
    assert take(core) == [Detokenized(3, "long")]


def test_shutting_down_ends_everything(core: TextCore) -> None:
    core.from_api(0, [submit(1), submit(2, chat_prompt("x")), Tokenize(3, chat_prompt("x"))])
    core.end_all(engine_error("bye").body)
    assert [message.uid for message in take(core)] == [1, 2, 3]
    assert core.idle
