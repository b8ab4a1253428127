"""The core between clients that come, cancel and vanish, a worker, and a scheduler that runs ahead."""

import codecs
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hybserve.core.errors import ErrorBody, engine_error, invalid_value
from hybserve.core.messages import (
    Cancel,
    ChatPrompt,
    Delta,
    Done,
    Failed,
    Finished,
    Generate,
    StopAt,
    Submit,
    TextPrompt,
    TokenPrompt,
    Tokens,
)
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import CacheTruth, Ended, ServingFacts, Timing
from hybserve.text import core, detokenize
from hybserve.text.core import TextCore
from hybserve.text.detokenize import Detokenizer
from hybserve.text.jobs import Encoded, Refused
from hybserve.text.request import Choice, Request
from hybserve.text.stop import StopMatcher
from hybserve.text.tokenize import Tokenizer

NO, STOP, LENGTH = int(Ended.NO), int(Ended.STOP), int(Ended.LENGTH)
PROMPTS = [
    TextPrompt("hi"),
    ChatPrompt(json.dumps([{"role": "user", "content": "hi"}]).encode()),
    TokenPrompt([5, 6]),
]


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
        prompt = data.draw(st.sampled_from(PROMPTS))
        include = data.draw(st.booleans())
        sampling = SamplingParams(max_tokens=100)
        message = Submit(uid, prompt, sampling, n, stop=tuple(stops), include_stop=include, return_token_ids=True)
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


def run_machine(facts: ServingFacts, tokenizer: Tokenizer, examples: int, repeatable: bool = False) -> None:
    TextMachine.facts, TextMachine.tokenizer = facts, tokenizer
    run_state_machine_as_test(
        TextMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            report_multiple_bugs=False,
            database=None,
            derandomize=repeatable,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_F33_F32_state_machine_one_terminal_event_right_usage_no_text_after_the_stop(
    make_facts: Callable[..., ServingFacts], tokenizers: dict[str, Tokenizer]
) -> None:
    run_machine(make_facts(), tokenizers["byte-level"], 80)


def never_closed(self: Choice, ended: int, original: Callable[..., Any] = Choice._finish) -> Any:
    reason = original(self, ended)
    self.open = True
    return reason


def never_forgotten(self: TextCore, uid: int, error: ErrorBody) -> None:
    if uid in self._requests:
        self._send(self._requests[uid].api, Failed(uid, error))


def never_forwarded(self: TextCore, uid: int) -> None:
    self._requests.pop(uid, None)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "held-back text is lost at the end": (StopMatcher, "flush", lambda self: ""),
    "an unfinished character is lost at the end": (detokenize._ByteStream, "flush", lambda self: ""),
    "tokens after the end still count": (Choice, "_finish", never_closed),
    "StopAt is one token short": (core, "StopAt", lambda uid, choice, index: StopAt(uid, choice, index - 1)),
    "usage counts one too many": (Request, "completion_tokens", 99),
    "a failed request goes on": (TextCore, "_fail", never_forgotten),
    "the scheduler does not hear of a cancel": (TextCore, "_cancel", never_forwarded),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_core_are_caught(
    name: str,
    make_facts: Callable[..., ServingFacts],
    tokenizers: dict[str, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError):
        run_machine(make_facts(), tokenizers["byte-level"], 300, repeatable=True)
