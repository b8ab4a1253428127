"""The loop's order, its links, and the role around it: heartbeat, stop, loss of a neighbour, loss of the engine."""

import pytest

from hybserve.core.errors import HybserveError
from hybserve.core.messages import (
    Drain,
    Failed,
    Fatal,
    Finished,
    Generate,
    Heartbeat,
    MetricsSnapshot,
    Ready,
    StepFailed,
    StepPlan,
    Stop,
    Tokens,
)
from hybserve.core.sampling import SamplingParams
from hybserve.scheduler.loop import Loop
from hybserve.scheduler.main import run
from hybserve.scheduler.scheduler import Scheduler
from tests.fakes import Link, TattletaleRunner, expected_tokens, limits

READY = Ready("engine", [("pages", "as planned")])


def generate(uid: int, max_tokens: int = 6, prompt: int = 5) -> Generate:
    return Generate(uid, list(range(prompt)), SamplingParams(seed=uid, max_tokens=max_tokens), 1, "", "", 0, 0.0, 0.0)


class Recorder(TattletaleRunner):
    """Remembers in what order it was used."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.log: list[str] = []

    def submit(self, frame: bytes) -> None:
        super().submit(frame)
        self.log.append("launch")

    def collect(self) -> bytes:
        self.log.append("wait")
        return super().collect()


class Clock:
    """Every look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Parent(Link):
    """Says Stop once ``enough`` holds; fails the test if that takes too long."""

    def __init__(self, enough, patience: int = 3000) -> None:
        super().__init__()
        self.enough = enough
        self.patience = patience

    def receive(self, timeout: float | None = None) -> list:
        self.patience -= 1
        assert self.patience, "the engine does not get anywhere"
        return [Stop()] if self.enough() else super().receive(timeout)


def test_a_turn_settles_then_plans_then_launches_behind_the_running_step_then_waits() -> None:
    engine, text = limits(), Link()
    runner = Recorder(engine)
    scheduler = Scheduler(engine, 10, None, Clock())
    settle, plan = scheduler.settle, scheduler.plan
    scheduler.settle = lambda result: (runner.log.append("settle"), settle(result))[1]
    scheduler.plan = lambda: (runner.log.append("plan"), plan())[1]
    loop = Loop(scheduler, runner, text)
    text.inbox.append(generate(1))
    loop.turn(0)
    loop.turn(0)
    runner.log.clear()
    loop.turn(0)
    assert runner.log == ["settle", "plan", "launch", "wait"]
    while loop.busy:
        loop.turn(0)
    assert isinstance(text.sent[-1], Finished)
    assert not runner.pending


def serve(text: Link, enough, runner: TattletaleRunner | None = None, control: Parent | None = None) -> Parent:
    engine = limits()
    control = control or Parent(enough)
    run(engine, 10, None, runner or TattletaleRunner(engine), text, control, READY, debug=True, clock=Clock())
    return control


def told(text: Link, kind: type) -> list:
    return [message for message in text.sent if isinstance(message, kind)]


def test_the_role_says_ready_serves_beats_and_stops_when_told() -> None:
    text = Link()
    text.inbox += [generate(1, 30), generate(2, 30, prompt=20)]
    runner = TattletaleRunner(limits())
    control = serve(text, lambda: len(told(text, MetricsSnapshot)) >= 2, runner)
    assert text.sent[0] == control.sent[0] == READY
    for uid, prompt in ((1, 5), (2, 20)):
        tokens = [t for m in told(text, Tokens) for u, t in zip(m.uids, m.tokens, strict=True) if u == uid]
        assert tokens == expected_tokens(list(range(prompt)), generate(uid, 30).sampling, 1, 4)[0]
    assert {message.uid for message in told(text, Finished)} == {1, 2}
    beats = [message for message in control.sent if isinstance(message, Heartbeat)]
    assert [beat.progress for beat in beats] == sorted(beat.progress for beat in beats)
    assert len(beats) == len(told(text, Heartbeat)) >= 4
    assert runner.stopped


def test_F53_a_lost_engine_tells_every_request_then_everybody_then_ends() -> None:
    def evil(plan: StepPlan, runner: TattletaleRunner) -> StepFailed | None:
        return StepFailed(plan.step, plan.epoch, [], "device lost") if plan.step == 4 else None

    text = Link()
    text.inbox += [generate(1, 30), generate(2, 30)]
    with pytest.raises(HybserveError, match="device lost") as caught:
        serve(text, lambda: False, TattletaleRunner(limits(), evil=evil))
    assert caught.value.exit_code == 1
    assert [message.uid for message in told(text, Failed)] == [1, 2]
    assert isinstance(text.sent[-1], Fatal)


def test_without_text_the_engine_waits_for_its_parent() -> None:
    text = Link()
    text.closed = True
    control = Parent(lambda: len(control.sent) > 3)
    serve(text, None, control=control)
    assert all(isinstance(message, Heartbeat) for message in control.sent[-2:])


def test_without_a_parent_the_engine_ends_with_its_link() -> None:
    control, text = Parent(lambda: False), Link()
    control.closed = True
    serve(text, None, control=control)
    text.closed = True
    engine = limits()
    run(engine, 10, None, TattletaleRunner(engine), text, None, READY, clock=Clock())


def test_a_draining_engine_stays_until_it_is_stopped() -> None:
    text = Link()
    text.inbox += [generate(1, 4), Drain(), generate(2, 4)]
    serve(text, lambda: len(told(text, Heartbeat)) > 3)
    assert {message.uid for message in told(text, Finished)} == {1}
    assert [message.error.code for message in told(text, Failed)] == ["draining"]
