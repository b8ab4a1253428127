"""The engine through the Triton forms: natively on a GPU, under Triton's interpreter elsewhere. Whatever is batched,
cut, shared and parked, every request gets what transformers computes for it alone (near ties aside, law 7).
"""

from functools import cache

import msgspec
import pytest
import torch

from bench.parity import NEAR_TIE, Subject
from hybserve.core.messages import Finished, Generate, PromptLogprobs, Tokens
from hybserve.core.sampling import SamplingParams
from hybserve.models.load import load_weights
from hybserve.models.registry import build_model
from hybserve.plan.result import EngineLimits
from hybserve.runner.main import Runner
from hybserve.scheduler.loop import Loop
from hybserve.scheduler.scheduler import Scheduler
from hybserve.spec.split import split_ranks
from tests.checkpoints import SHAPES
from tests.e2e.test_engine import Engine, Text, alone

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = ("dense", "moe")  # the rest natively only
OUTPUTS = 3 if DEVICE == "cpu" else 12
LENGTHS = (3, 64, 130) if DEVICE == "cpu" else (200, 3, 64, 65, 128, 191, 193, 1, 500, 1000)


class DeviceSubject(Subject):
    """A shape whose engine computes through the Triton forms; its truths are transformers'."""

    def __init__(self, shape: str, directory) -> None:
        super().__init__(shape, directory)
        share = split_ranks(self.spec)[0]
        self.device_model = build_model(self.spec, share, torch.float32, DEVICE, triton=True)
        load_weights(directory / shape, self.spec, share, self.device_model.params)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    @cache
    def make(shape: str) -> DeviceSubject:
        return DeviceSubject(shape, tmp_path_factory.mktemp("triton"))

    return make


def make_limits(**changes) -> EngineLimits:
    values = {
        "page_size": 64, "kv_pages": 40, "state_slots": 12, "max_running": 4, "max_seq_len": 1100, "step_tokens": 256,
        "prefill_chunk": 128, "kv_dtype": "float32", "state_dtype": "float32", "conv_dtype": "float32",
        "cuda": DEVICE == "cuda", "graphs": False,
    }  # fmt: skip
    return EngineLimits(**values | changes)


def make_engine(subject: DeviceSubject, limits: EngineLimits, model=None) -> Engine:
    model = model or subject.device_model
    limits = msgspec.structs.replace(limits, stateful=subject.spec.recurrent_layers > 0)
    # pages that a sequence leaves may live on in the tree: only without one can they be poisoned
    poison = not limits.prefix
    runner = Runner(model, subject.spec, split_ranks(subject.spec)[0], limits, device=DEVICE, poison=poison)
    if limits.graphs:
        runner.compile()
        runner.capture()
        runner.warm_up()
    scheduler, text = Scheduler(limits, 100, None, clock=lambda: 0.0), Text()
    return Engine(scheduler, runner, text, Loop(scheduler, runner, text))


def generate(uid: int, prompt: list[int], n: int = 1, **sampling) -> Generate:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": OUTPUTS} | sampling)
    return Generate(uid, prompt, params, n, "", "", 0, float(uid), 0.0)


def check(subject: DeviceSubject, prompt: list[int], output: list[int]) -> None:
    """Greedy tokens are transformers', up to the first near tie."""
    logits = subject.oracle(prompt + output)[len(prompt) - 1 : -1]
    for index, (token, row) in enumerate(zip(output, logits, strict=True)):
        best = torch.topk(row, 2)
        if float(best.values[0] - best.values[1]) < NEAR_TIE:
            return
        assert token == int(best.indices[0]), f"prompt of {len(prompt)}, output {index}"


@pytest.mark.parametrize(
    "shape",
    [shape if shape in INTERPRETED else pytest.param(shape, marks=pytest.mark.gpu) for shape in SHAPES],
)
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_greedy_tokens_equal_transformers_cold_warm_chunked_and_batched(subject, shape, graphs):
    one = subject(shape)
    engine = make_engine(one, make_limits(prefix=True, graphs=graphs, kv_pages=100, state_slots=60))
    prompts = one.prompts(LENGTHS)
    for begin in (0, len(prompts)):  # the second time all prompts are cached
        engine.text.inbox = [generate(begin + uid, prompt) for uid, prompt in enumerate(prompts)]
        engine.run()
    outputs = engine.outputs()
    for uid, prompt in enumerate([*prompts, *prompts]):
        assert len(outputs[uid, 0]) == OUTPUTS
        check(one, prompt, outputs[uid, 0])
    caches = {message.uid: message.cache for message in engine.text.heard if isinstance(message, Finished)}
    longest = max(range(len(prompts)), key=lambda uid: len(prompts[uid]))
    assert caches[len(prompts) + longest].hit >= (len(prompts[longest]) - 1) // 64 * 64 - 128
    assert engine.runner.pools.padding_intact()


@pytest.mark.gpu  # a page of 64 tokens has to be outgrown twice: too many steps for the interpreter
def test_requests_that_do_not_fit_park_and_resume(subject):
    one = subject("dense")
    engine = make_engine(one, make_limits(kv_pages=9, max_seq_len=256, state_slots=6))
    prompts = one.prompts((60, 62, 63, 61))
    engine.text.inbox = [generate(uid, prompt, max_tokens=90) for uid, prompt in enumerate(prompts)]
    engine.run()
    for uid, prompt in enumerate(prompts):
        check(one, prompt, engine.outputs()[uid, 0])
    assert engine.scheduler.running.parks > 0
    assert engine.runner.pools.padding_intact()


def test_choices_penalties_and_logprobs_equal_those_of_the_torch_forms(subject):
    one = subject("dense")
    engine = make_engine(one, make_limits())
    (prompt,) = one.prompts((66,))
    params = [
        SamplingParams(temperature=1.5, seed=3, top_p=0.9, max_tokens=3),
        SamplingParams(temperature=1.0, seed=9, repetition_penalty=1.3, top_k=20, max_tokens=3),
        SamplingParams(temperature=0.0, frequency_penalty=1.0, logit_bias=((7, 3.0),), logprobs=2, max_tokens=3),
    ]
    engine.text.inbox = [
        Generate(uid, prompt, sampling, 1 + (uid == 0), "", "", 0, float(uid), 0.0)
        for uid, sampling in enumerate(params)
    ]
    engine.run()
    outputs = engine.outputs()
    for uid, sampling in enumerate(params):
        for choice in range(1 + (uid == 0)):
            assert outputs[uid, choice] == alone(one, prompt, sampling, choice), (uid, choice)
    told = [message for message in engine.text.heard if isinstance(message, Tokens) and message.logprobs]
    entries = [entry for message in told for uid, entry in zip(message.uids, message.logprobs, strict=True) if uid == 2]
    assert [len(entry.top_ids) for entry in entries] == [2, 2, 2]
    logits = torch.log_softmax(one.oracle(prompt + outputs[2, 0])[len(prompt) - 1 : -1], -1)
    for entry, token, row in zip(entries, outputs[2, 0], logits, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)
        assert entry.top_logprobs[0] == pytest.approx(float(row.max()), abs=2e-4)


def test_prompt_logprobs_are_those_of_transformers(subject):
    one = subject("dense")
    engine = make_engine(one, make_limits())
    (prompt,) = one.prompts((140,))
    engine.text.inbox = [generate(0, prompt, max_tokens=1, prompt_logprobs=1)]
    engine.run()
    entries = [
        entry for message in engine.text.heard if isinstance(message, PromptLogprobs) for entry in message.entries
    ]
    rows = torch.log_softmax(one.oracle(prompt), -1)
    assert len(entries) == len(prompt) - 1
    for entry, row, token in zip(entries, rows, prompt[1:], strict=False):
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)
