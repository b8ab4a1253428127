import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

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
from hybserve.text.core import INLINE_TEXT, TextCore
from hybserve.text.detokenize import Detokenizer
from hybserve.text.jobs import Decode, Decoded, Encode, Encoded, Refused
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
    assert core.jobs == [Encode(1, chat_prompt("hi"), True), Encode(2, TextPrompt(long), False)]
    core.from_worker(Encoded(1, [5, 6]))
    core.from_worker(Refused(2, invalid_value("no", "prompt").body))
    (generate,) = core.to_engine
    assert isinstance(generate, Generate)
    assert generate.prompt == [5, 6]
    assert only_error(core).param == "prompt"


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


# Everything at once


@dataclass
class Script:
    """One request as the driver knows it: what each choice will sample, and what came of it."""

    submit: Submit
    api: int
    tokens: list[list[int]]
    mark: int  # how the scheduler ends a choice that nothing else ends
    running: bool = False
    sent: list[int] = field(default_factory=list)
    stopped: dict[int, int] = field(default_factory=dict)
    finished: bool = False
    cancelled: bool = False
    got: list[Any] = field(default_factory=list)


def expected(detokenizer: Detokenizer, script: Script, choice: int, eos: int) -> tuple[str, str, int]:
    """(text, finish reason, tokens) of a choice, from whole texts only."""
    tokens, stops = script.tokens[choice], script.submit.stop
    for count in range(1, len(tokens) + 1):
        last = count == len(tokens)
        visible = tokens[: count - 1] if tokens[count - 1] == eos and last else tokens[:count]
        data = b"".join(detokenizer.token_bytes(token) for token in visible if not detokenizer.is_special(token))
        text = data.decode("utf-8", "replace") if last else settled(data)
        for end in range(len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                return (text[: end if script.submit.include_stop else end - max(map(len, found))], "stop", count)
    return text, "stop" if script.mark == STOP else "length", len(tokens)


def settled(data: bytes) -> str:
    for cut in range(4):
        try:
            data[: len(data) - cut].decode("utf-8", "strict")
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                break
        else:
            return data[: len(data) - cut].decode()
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def seldom(one_in: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([False] * (one_in - 1) + [True])


class TextMachine(RuleBasedStateMachine):
    """The core between clients that come, cancel and vanish, a worker, and a scheduler that runs one step ahead."""

    facts: ServingFacts
    tokenizer: Tokenizer

    def __init__(self) -> None:
        super().__init__()
        self.core = TextCore(self.facts, self.tokenizer, False, lambda: 1)
        self.core.apis = {0, 1}
        self.detokenizer = Detokenizer(self.tokenizer)
        self.scripts: dict[int, Script] = {}
        self.jobs: list[Any] = []
        self.late_stops: list[StopAt] = []
        self.engine_alive = True
        table = {self.detokenizer.token_bytes(i): i for i in range(len(self.tokenizer.vocab))}
        chunks = [b"a", b"b", b"ab", "🙂".encode(), "🙂".encode()[:2], b"\x9f", b"\xff", "é\ufffd".encode()]
        self.chunks = [[table[bytes([byte])] for byte in chunk] for chunk in chunks]
        self.chunks += [[self.tokenizer.vocab["<think>"]], [self.tokenizer.vocab["<|im_start|>"]]]
        self.eos = self.tokenizer.vocab["<|im_end|>"]

    @rule(data=st.data(), api=st.integers(0, 1))
    def submit(self, data: st.DataObject, api: int) -> None:
        if api not in self.core.apis:
            return
        uid = len(self.scripts) + 1
        n = data.draw(st.integers(1, 2))
        stops = data.draw(st.lists(st.sampled_from(["a", "ab", "🙂", "b🙂a", "\ufffd", "é"]), max_size=2))
        mark = data.draw(st.sampled_from([STOP, LENGTH]))
        end = [self.eos] if mark == STOP else []
        body = st.lists(st.sampled_from(self.chunks), min_size=1, max_size=5)
        tokens = [[token for chunk in data.draw(body) for token in chunk] + end for _ in range(n)]
        prompt = data.draw(st.sampled_from(["hi", chat_prompt("hi"), [5, 6]]))
        include = data.draw(st.booleans())
        message = submit(uid, prompt, n=n, stop=tuple(stops), include_stop=include, return_token_ids=True)
        self.scripts[uid] = Script(message, api, tokens, mark, sent=[0] * n)
        self.core.from_api(api, [message])

    @precondition(lambda self: self.jobs)
    @rule(refuse=st.booleans())
    def work(self, refuse: bool) -> None:
        job = self.jobs.pop(0)
        outcome = Refused(job.job, invalid_value("no").body) if refuse else Encoded(job.job, [5, 6, 7])
        self.core.from_worker(outcome)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One settled step: a token for each open choice, Finished for requests without one."""
        if not self.engine_alive:
            return
        columns: list[tuple[int, int, int, int]] = []
        done: list[int] = []
        for uid, script in self.scripts.items():
            if not script.running or script.finished:
                continue
            for choice, tokens in enumerate(script.tokens):
                at = script.sent[choice]
                if at < len(tokens) and choice not in script.stopped:
                    last = script.mark if at + 1 == len(tokens) else NO
                    columns.append((uid, choice, tokens[at], last))
                    script.sent[choice] += 1
            if all(c in script.stopped or script.sent[c] == len(t) for c, t in enumerate(script.tokens)):
                script.finished = True
                done.append(uid)
        columns = data.draw(st.permutations(columns))
        if columns:
            uids, choices, tokens_, ended = map(list, zip(*columns, strict=True))
            self.core.from_engine([Tokens(uids, choices, tokens_, ended, [])])
        self.hear()
        self.core.from_engine([Finished(uid, CacheTruth(), Timing()) for uid in done])

    @rule()
    def hear_stops(self) -> None:
        """The scheduler acts on StopAt only now: it may have run ahead."""
        for stop in self.late_stops:
            self.scripts[stop.uid].stopped[stop.choice] = stop.index
        self.late_stops.clear()

    @precondition(lambda self: self.scripts)
    @rule(data=st.data(), now=seldom(4))
    def cancel(self, data: st.DataObject, now: bool) -> None:
        if not now:
            return
        uid = data.draw(st.sampled_from(sorted(self.scripts)))
        script = self.scripts[uid]
        if script.api in self.core.apis and not script.cancelled and not self.terminal(script):
            script.cancelled = True
            self.core.from_api(script.api, [Cancel(uid)])
            assert (Cancel(uid) in self.core.to_engine) == script.running

    @rule(uid=st.integers(1, 30), now=seldom(10))
    def fail(self, uid: int, now: bool) -> None:
        script = self.scripts.get(uid)
        if now and script is not None and script.running and not script.finished and self.engine_alive:
            script.finished = True
            self.core.from_engine([Failed(uid, engine_error("bad row").body)])

    @rule(api=st.integers(0, 1), now=seldom(20))
    def lose_api(self, api: int, now: bool) -> None:
        if now and api in self.core.apis:
            self.hear()
            self.core.api_lost(api)
            for script in self.scripts.values():
                if script.api == api and not self.terminal(script):
                    script.cancelled = True

    @rule(now=seldom(40))
    def lose_engine(self, now: bool) -> None:
        if now and self.engine_alive:
            self.engine_alive = False
            self.core.engine_lost("gone")

    @invariant()
    def outboxes(self) -> None:
        self.hear()

    def hear(self) -> None:
        """Empty the outboxes as the role does, through the codec's types."""
        for message in self.core.to_engine:
            match message:
                case Generate(uid=uid):
                    assert not self.scripts[uid].running
                    self.scripts[uid].running = True
                case Cancel(uid=uid):
                    assert self.scripts[uid].cancelled or self.scripts[uid].api not in self.core.apis
                    self.scripts[uid].finished = True
                case StopAt(uid=uid, choice=choice, index=index):
                    assert expected(self.detokenizer, self.scripts[uid], choice, self.eos)[1:] == ("stop", index)
                    assert all((stop.uid, stop.choice) != (uid, choice) for stop in self.late_stops)
                    assert choice not in self.scripts[uid].stopped
                    self.late_stops.append(message)
        self.core.to_engine.clear()
        withdrawn, self.core.withdrawn = self.core.withdrawn, []
        self.jobs = [job for job in self.jobs + self.core.jobs if job.job not in withdrawn]
        self.core.jobs.clear()
        for api, messages in self.core.to_apis.items():
            for message in msgspec.msgpack.decode(msgspec.msgpack.encode(messages), type=list[Delta | Done | Failed]):
                script = self.scripts[message.uid]
                assert script.api == api
                assert not script.cancelled
                assert not self.terminal(script), "something after the terminal event"
                script.got.append(message)
        self.core.to_apis.clear()

    @staticmethod
    def terminal(script: Script) -> bool:
        return bool(script.got) and isinstance(script.got[-1], Done | Failed)

    def teardown(self) -> None:
        self.hear()
        while self.jobs:
            self.core.from_worker(Encoded(self.jobs.pop(0).job, [5]))
            self.hear()
        for _ in range(12):
            self.run_step()
        assert self.core.idle
        for script in self.scripts.values():
            self.check(script)

    def run_step(self) -> None:
        self.hear_stops()
        if not self.engine_alive:
            return
        for uid, script in self.scripts.items():
            while script.running and not script.finished:
                for choice, tokens in enumerate(script.tokens):
                    at = script.sent[choice]
                    if at < len(tokens) and choice not in script.stopped:
                        last = script.mark if at + 1 == len(tokens) else NO
                        script.sent[choice] += 1
                        self.core.from_engine([Tokens([uid], [choice], [tokens[at]], [last], [])])
                self.hear()
                self.hear_stops()
                if all(c in script.stopped or script.sent[c] == len(t) for c, t in enumerate(script.tokens)):
                    script.finished = True
                    self.core.from_engine([Finished(uid, CacheTruth(), Timing())])
                    self.hear()

    def check(self, script: Script) -> None:
        """Exactly one terminal event unless cancelled; texts, reasons and usage of what was not failed."""
        terminals = [message for message in script.got if isinstance(message, Done | Failed)]
        assert len(terminals) == (0 if script.cancelled else 1)
        by_choice: dict[int, list[Delta]] = defaultdict(list)
        for message in script.got:
            if isinstance(message, Delta):
                by_choice[message.choice].append(message)
        total = 0
        for choice in range(script.submit.n):
            deltas = by_choice[choice]
            closed = bool(deltas) and deltas[-1].finish_reason is not None
            assert all(delta.finish_reason is None for delta in deltas[:-1])
            text, reason, count = expected(self.detokenizer, script, choice, self.eos)
            if closed:
                assert "".join(delta.text for delta in deltas) == text
                assert deltas[-1].finish_reason == reason
                assert [token for delta in deltas for token in delta.token_ids or []] == script.tokens[choice][:count]
                assert sum(delta.tokens for delta in deltas) == count
            else:
                assert text.startswith("".join(delta.text for delta in deltas))
                assert not terminals or isinstance(terminals[0], Failed)
            total += count
        if terminals and isinstance(terminals[0], Done):
            assert terminals[0].completion_tokens == total


def test_F33_F32_state_machine_one_terminal_event_right_usage_no_text_after_the_stop(
    make_facts: Callable[..., ServingFacts], tokenizers: dict[str, Tokenizer]
) -> None:
    TextMachine.facts, TextMachine.tokenizer = make_facts(), tokenizers["byte-level"]
    run_state_machine_as_test(
        TextMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
