"""The real scheduler over the real runner, through frames, one plan ahead: what comes out is what each request alone
would have said, however requests meet, fork, park and die.
"""

import random
from functools import cache
from typing import NamedTuple

import pytest
import torch

from bench.parity import Subject, Truth
from bench.plan_driver import Driver
from hybserve.core.messages import Cancel, Failed, Finished, Generate, PromptLogprobs, StopAt, Tokens
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import Ended
from hybserve.plan.result import EngineLimits
from hybserve.runner.main import Runner
from hybserve.scheduler.loop import Loop
from hybserve.scheduler.scheduler import Scheduler
from hybserve.spec.split import split_ranks

torch.set_num_threads(1)
OUTPUTS = 9


class Text:
    """The text role's end: what it will send, step by step, and what it heard."""

    def __init__(self) -> None:
        self.inbox: list[object] = []
        self.heard: list[object] = []

    def receive(self, timeout=None, /):
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages, /) -> None:
        self.heard += messages


class Engine(NamedTuple):
    scheduler: Scheduler
    runner: Runner
    text: Text
    loop: Loop

    def run(self, until=None, turns: int = 3000) -> None:
        for _ in range(turns):
            self.loop.turn(0)
            self.scheduler.check()
            if until is None and self.scheduler.idle and not self.loop.busy and not self.text.inbox:
                return
            if until is not None and until():
                return
        raise AssertionError("the engine did not come to an end")

    def outputs(self) -> dict[tuple[int, int], list[int]]:
        out: dict[tuple[int, int], list[int]] = {}
        for message in self.text.heard:
            if isinstance(message, Tokens):
                for uid, choice, token in zip(message.uids, message.choices, message.tokens, strict=True):
                    out.setdefault((uid, choice), []).append(token)
        return out


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    @cache
    def make(shape: str) -> Subject:
        return Subject(shape, tmp_path_factory.mktemp("engine"))

    return make


def make_limits(**changes) -> EngineLimits:
    values = {
        "page_size": 4, "kv_pages": 14, "state_slots": 7, "max_running": 5, "max_seq_len": 64, "step_tokens": 16,
        "prefill_chunk": 12, "kv_dtype": "float32", "state_dtype": "float32", "conv_dtype": "float32",
    }  # fmt: skip
    return EngineLimits(**values | changes)


def make_engine(subject: Subject, limits: EngineLimits) -> Engine:
    runner = Runner(subject.model, subject.spec, split_ranks(subject.spec)[0], limits, poison=True)
    scheduler, text = Scheduler(limits, 100, None, clock=lambda: 0.0), Text()
    return Engine(scheduler, runner, text, Loop(scheduler, runner, text))


def generate(uid: int, prompt: list[int], sampling: SamplingParams, n: int = 1) -> Generate:
    return Generate(uid, prompt, sampling, n, "", "", 0, float(uid), 0.0)


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": OUTPUTS} | changes)


def alone(subject: Subject, prompt: list[int], sampling: SamplingParams, choice: int) -> list[int]:
    limits = make_limits(kv_pages=40)
    runner = Runner(subject.model, subject.spec, split_ranks(subject.spec)[0], limits)
    driver = Driver(runner, limits)
    live = driver.add(prompt, sampling, choice)
    while len(live.output) < sampling.max_tokens:
        driver.step([(live, 100)])
    return live.output


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
@pytest.mark.parametrize("shape", ["dense", "no_recurrent", "no_attention", "next_mixed"])
def test_greedy_tokens_equal_transformers(subject, shape, deterministic):
    """Pools too small for all: requests queue, park and resume."""
    one = subject(shape)
    truths: list[Truth] = one.truths(4)
    engine = make_engine(one, make_limits(deterministic=deterministic))
    engine.text.inbox = [generate(uid, truth.prompt, greedy()) for uid, truth in enumerate(truths)]
    engine.run()
    outputs = engine.outputs()
    for uid, truth in enumerate(truths):
        assert outputs[uid, 0] == truth.output
        assert truth.output == truth.oracle.argmax(-1).tolist()
    assert engine.scheduler.running.parks > 0
    assert engine.runner.pools.padding_intact()
    assert len(engine.runner.sequences) <= 5


@pytest.mark.parametrize("length", [6, 8, 13])
@pytest.mark.parametrize("pages", [14, 60])
def test_choices_equal_those_alone(subject, length, pages):
    one = subject("dense")
    prompt = one.prompts([length])[0]
    params = [
        greedy(),
        greedy(temperature=1.5, seed=3, top_p=0.9),
        greedy(temperature=1.0, seed=9, repetition_penalty=1.3),
    ]
    engine = make_engine(one, make_limits(kv_pages=pages))
    engine.text.inbox = [generate(uid, prompt, sampling, n=3) for uid, sampling in enumerate(params)]
    engine.run()
    outputs = engine.outputs()
    for uid, sampling in enumerate(params):
        for choice in range(3):
            assert outputs[uid, choice] == alone(one, prompt, sampling, choice)
    assert engine.runner.pools.padding_intact()


def test_first_choice_that_ends_at_once_still_feeds_the_others(subject):
    one = subject("dense")
    prompt = one.prompts([7])[0]
    sampling = greedy(temperature=1.0, seed=4)
    first = alone(one, prompt, sampling, 0)[0]
    sampling = greedy(temperature=1.0, seed=4, stop_ids=(first,))
    engine = make_engine(one, make_limits())
    engine.text.inbox = [generate(0, prompt, sampling, n=4)]
    engine.run()
    for choice in range(4):
        expected = alone(one, prompt, greedy(temperature=1.0, seed=4), choice)
        cut = expected.index(first) + 1 if first in expected else OUTPUTS
        assert engine.outputs()[0, choice] == expected[:cut]
    assert len(engine.outputs()[0, 0]) == 1


def test_prompt_logprobs_come_once_and_in_order_over_parks(subject):
    one = subject("dense")
    prompts = one.prompts([30, 21, 25])
    whole = {uid: one.oracle(prompt).log_softmax(-1) for uid, prompt in enumerate(prompts)}
    engine = make_engine(one, make_limits())
    params = greedy(prompt_logprobs=1)
    engine.text.inbox = [generate(uid, prompt, params) for uid, prompt in enumerate(prompts)]
    engine.run()
    assert engine.scheduler.running.parks > 0
    seen: dict[int, list[float]] = {uid: [] for uid in range(len(prompts))}
    for message in engine.text.heard:
        if isinstance(message, PromptLogprobs):
            assert message.first == len(seen[message.uid]) + 1
            seen[message.uid] += [entry.logprob for entry in message.entries]
    for uid, prompt in enumerate(prompts):
        expected = whole[uid][torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        torch.testing.assert_close(torch.tensor(seen[uid]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_storm_of_arrivals_cancels_and_stops_F11_F13_F68(subject, seed):
    """Whoever survives says what it says alone; whoever is cut says a prefix of it; nothing is left behind."""
    rng, one = random.Random(seed), subject("dense")
    truths = one.truths(4)
    engine = make_engine(one, make_limits())
    cut: set[int] = set()
    expected: dict[int, Truth] = {}
    for uid in range(40):
        truth = expected[uid] = rng.choice(truths)
        engine.text.inbox.append(generate(uid, truth.prompt, greedy(), n=rng.choice((1, 1, 2))))
        for _ in range(rng.randrange(6)):
            engine.loop.turn(0)
            engine.scheduler.check()
        if rng.random() < 0.4 and uid:
            victim = rng.randrange(uid)
            cut.add(victim)
            choice, at = 0, rng.randrange(1, 5)
            engine.text.inbox.append(rng.choice((Cancel(victim), StopAt(victim, choice, at))))
    engine.run()
    outputs = engine.outputs()
    for (uid, _), tokens in outputs.items():
        assert tokens == expected[uid].output[: len(tokens)]
        assert uid in cut or len(tokens) == OUTPUTS
    ends = [message.uid for message in engine.text.heard if isinstance(message, Finished | Failed)]
    assert len(ends) == len(set(ends))
    assert set(range(40)) - cut <= set(ends)
    assert engine.scheduler.running.pages.held == engine.scheduler.running.slots.held == 0
    assert engine.runner.pools.padding_intact()


def test_a_stop_id_ends_a_choice_and_is_marked(subject):
    one = subject("dense")
    truth = one.truths(4)[0]
    stop = truth.output[3]
    first = truth.output.index(stop)
    engine = make_engine(one, make_limits())
    engine.text.inbox = [generate(0, truth.prompt, greedy(stop_ids=(stop,)))]
    engine.run()
    marks = [mark for message in engine.text.heard if isinstance(message, Tokens) for mark in message.ended]
    assert engine.outputs()[0, 0] == truth.output[: first + 1]
    assert marks == [Ended.NO] * first + [Ended.STOP]


def test_non_finite_request_fails_alone_F50(subject):
    """NaN in one embedding row: requests that meet the token fail, the others are as alone."""
    one = subject("dense")
    truths = one.truths(4)
    absent = next(
        token for token in range(one.spec.vocab_size) if all(token not in t.prompt + t.output for t in truths)
    )
    embed = one.model.params["embed.weight"]
    before = embed[absent].clone()
    engine = make_engine(one, make_limits())
    try:
        embed[absent] = float("nan")
        for uid, truth in enumerate(truths):
            engine.text.inbox.append(generate(uid, truth.prompt, greedy()))
            engine.text.inbox.append(generate(100 + uid, [absent, *truth.prompt], greedy()))
        engine.run()
    finally:
        embed[absent] = before
    failed = {message.uid: message.error.code for message in engine.text.heard if isinstance(message, Failed)}
    assert failed == {100 + uid: "numerical_error" for uid in range(len(truths))}
    for uid, truth in enumerate(truths):
        assert engine.outputs()[uid, 0] == truth.output
    assert engine.scheduler.running.pages.held == 0
