"""The real scheduler, tree and runner: what a prefix hit gives is what a cold run gives, to the token, and in the
deterministic mode to the bit. Freed pages and slots are overwritten with NaN just before the next plan runs.
"""

import random
from functools import cache

import pytest
import torch

from bench.parity import Subject
from hybserve.core.messages import Finished
from hybserve.runner.main import Runner
from hybserve.scheduler.loop import Loop
from hybserve.scheduler.scheduler import Scheduler
from hybserve.spec.split import split_ranks
from tests.e2e.test_engine import OUTPUTS, Engine, Text, generate, greedy, make_limits
from tests.fakes import PoisoningLink

torch.set_num_threads(1)
PAGE = 4


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    @cache
    def make(shape: str) -> Subject:
        return Subject(shape, tmp_path_factory.mktemp("prefix"))

    return make


def make_engine(subject: Subject, **changes) -> Engine:
    limits = make_limits(**{"kv_pages": 60, "state_slots": 20, "prefix": True, "slot_price": 2.0} | changes)
    runner = Runner(subject.model, subject.spec, split_ranks(subject.spec)[0], limits)
    scheduler, text = Scheduler(limits, 100, None, clock=lambda: 0.0), Text()
    return Engine(scheduler, runner, text, Loop(scheduler, PoisoningLink(runner, scheduler), text))


def hits(engine: Engine) -> dict[int, object]:
    return {message.uid: message.cache for message in engine.text.heard if isinstance(message, Finished)}


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
@pytest.mark.parametrize("shape", ["dense", "no_recurrent", "no_attention", "next_mixed"])
def test_shared_prefixes_under_pressure_give_the_cold_tokens(subject, shape, deterministic):
    one = subject(shape)
    stateful = one.spec.recurrent_layers > 0
    truths = one.truths(4)
    engine = make_engine(
        one, kv_pages=36, state_slots=12, deterministic=deterministic, stateful=stateful, checkpoint_every=8
    )
    rng = random.Random(5)
    expected = {}
    for uid in range(24):
        truth = rng.choice(truths)
        expected[uid] = truth
        engine.text.inbox.append(generate(uid, truth.prompt, greedy(), n=rng.choice((1, 1, 2))))
        if rng.random() < 0.5:
            engine.run()
    engine.run()
    for (uid, _), tokens in engine.outputs().items():
        assert tokens == expected[uid].output, uid
    warm = [cache for cache in hits(engine).values() if cache.hit]
    assert len(warm) > 5
    assert engine.runner.pools.padding_intact()
    assert len(expected) == len(hits(engine))
    assert all(len(tokens) == OUTPUTS for tokens in engine.outputs().values())
