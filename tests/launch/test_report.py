"""The startup report: complete, short, and its figures are the plan's."""

import io

import pytest

from hybserve.config.deployment import Deployment
from hybserve.core.messages import Ready
from hybserve.core.types import ServingFacts
from hybserve.core.units import GIB
from hybserve.launch.report import MAX_LINES, Started, layer_stack, print_report
from hybserve.plan.facts import MemoryFacts
from hybserve.plan.planner import make_plan
from hybserve.spec.model_spec import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelSpec

DELTA, ATTENTION = LayerSpec("gated_delta", "dense"), LayerSpec("attention", "dense")
SPEC = ModelSpec(
    family="qwen3_5",
    vocab_size=300,
    hidden=64,
    ffn=96,
    layers=(DELTA, DELTA, DELTA, ATTENTION) * 2,
    attention=AttentionSpec(4, 2, 16, 8, 1e4),
    gated_delta=GatedDeltaSpec(2, 4, 16, 16, 4),
    moe=None,
    norm_eps=1e-6,
    tied=False,
    dtype="float32",
    max_seq_len=4096,
)


def started(key_variable=None, report=()):
    plan = make_plan(SPEC, Deployment(), MemoryFacts("cpu", 8 * GIB))
    facts = ServingFacts(
        served_names=("tiny",),
        model_dir="/models/tiny",
        family="qwen3_5",
        vocab_size=300,
        max_seq_len=4096,
        max_running=16,
        page_size=64,
        capacity_tokens=4096,
        eos_ids=(2,),
        bos_id=None,
        sampling_defaults={"temperature": 0.7, "top_p": 0.9},
        sampling_source="generation_config.json",
        created=0,
        version="9.9",
    )
    ready = [Ready("engine", [("weights", "planned 1 MiB, real 1 MiB, drift 0 B"), *report])]
    stages = [("interpreter", 0.5), ("plan", 0.25), ("weights", 1.0), ("nothing", 0.0)]
    return Started(SPEC, plan, facts, "cpu", "float32", "http://127.0.0.1:8000", key_variable, ready, stages)


def printed(**changes):
    stream = io.StringIO()
    print_report(started(**changes), stream)
    return stream.getvalue()


def test_everything_that_was_promised_is_there():
    text = printed()
    for part in (
        "hybserve 9.9 serves tiny",
        "8 layers: 2 x (3 gated_delta, 1 attention)",
        "of KV per token",
        "per state",
        "drift 0 B",
        "16 running x 4K",
        "multiples of 64 tokens",
        "temperature 0.7, top_p 0.9 (from generation_config.json)",
        "1.75 s = interpreter 0.50 + plan 0.25 + weights 1.00",
        "curl http://127.0.0.1:8000/v1/chat/completions",
    ):
        assert part in text, text
    assert text.splitlines()[-1] == "ready at http://127.0.0.1:8000"


def test_it_is_never_longer_than_promised():
    text = printed(report=[("warning", f"number {number}") for number in range(50)])
    assert len(text.splitlines()) == MAX_LINES
    assert "more lines" in text
    assert text.splitlines()[-1].startswith("ready at")


def test_the_curl_line_names_the_variable_of_the_key_and_not_the_key():
    assert 'Bearer $MY_KEY"' in printed(key_variable="MY_KEY")


def test_a_terminal_gets_the_same_words_in_colour(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    print_report(started(), stream)
    assert "http://127.0.0.1:8000" in stream.getvalue()


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([ATTENTION], "1 x attention"),
        ([DELTA] * 3, "3 x gated_delta"),
        ([DELTA, ATTENTION, DELTA], "3 layers: 1 x (1 gated_delta, 1 attention), 1 gated_delta"),
        ([DELTA, LayerSpec("attention", "moe")], "2 layers: 1 gated_delta, 1 attention+moe"),
    ],
)
def test_layer_stacks(layers, text):
    assert layer_stack(layers) == text
