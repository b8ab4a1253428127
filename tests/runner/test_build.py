"""build_runner on a real checkpoint: weights in, first steps, what was allocated."""

import pytest
import torch

from bench.plan_driver import Driver
from hybserve.config.deployment import Deployment
from hybserve.core.errors import ModelError
from hybserve.core.sampling import SamplingParams
from hybserve.plan.result import StagePlan
from hybserve.runner.main import build_runner
from hybserve.runner.memory import drift
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.inventory import params_of
from hybserve.spec.split import split_ranks
from tests.checkpoints import make_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("build"), "tied")


@pytest.mark.parametrize("load", ["weights", "dummy"])
def test_built_runner_serves_and_counts_its_bytes_peer63(checkpoint, make_limits, load):
    spec = read_model_spec(checkpoint)
    limits = make_limits()
    seen: list[tuple[int, int]] = []
    deployment = Deployment.build({"model": {"load": load}})
    runner = build_runner(deployment, spec, limits, checkpoint, lambda done, total: seen.append((done, total)))
    driver = Driver(runner, limits)
    live = driver.add([5, 6, 7], SamplingParams(temperature=0.0))
    driver.step([(live, 3)])
    driver.step([(live, 1)])
    assert len(live.output) == 2
    assert runner.pools.padding_intact()
    if load == "weights":
        assert seen[-1][0] == seen[-1][1] > 0
    measured = runner.measured()
    share = split_ranks(spec)[0]
    elements = [torch.Size(param.local_shape(share)).numel() for param in params_of(spec, share)]
    assert measured.weights == 4 * sum(elements)
    assert measured.kv_pool == runner.pools.pages.numel()
    assert measured.resident > measured.weights


def test_drift_names_planned_real_and_difference(checkpoint, make_limits):
    spec = read_model_spec(checkpoint)
    runner = build_runner(Deployment(), spec, make_limits(), checkpoint)
    real = runner.measured()
    planned = StagePlan(0, 0, 5, 3, 2, 1, 1, real.weights, real.pools - 2048, 0, 0, 0, 0, 1 << 30)
    lines = dict(drift(planned, real))
    assert lines["weights"].endswith("drift 0 B")
    assert lines["pools"].endswith("drift +2 KiB")
    assert "resident" in lines["process"]


def test_model_that_computes_nan_is_refused_before_it_serves_peer60(checkpoint, make_limits, monkeypatch):
    spec = read_model_spec(checkpoint)
    monkeypatch.setattr("hybserve.runner.main.load_weights", lambda *args: args[3]["norm.weight"].fill_(float("nan")))
    with pytest.raises(ModelError, match="finite"):
        build_runner(Deployment(), spec, make_limits(), checkpoint)


@pytest.mark.parametrize(
    ("model", "kv", "state"),
    [
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "float8_e4m3fn", "bfloat16"),
        ("float16", "float16", "float32"),
        ("float32", "float8_e4m3fn", "float32"),
    ],
)
def test_other_dtypes_stay_close_to_fp32(checkpoint, make_limits, model, kv, state):
    """Log-probabilities of the prompt, in chunks beside a decoding row, near those of the fp32 engine."""
    spec = read_model_spec(checkpoint)

    def scores(dtype: str, **changes: str) -> torch.Tensor:
        limits = make_limits(**changes)
        deployment = Deployment.build({"model": {"dtype": dtype}})
        runner = build_runner(deployment, spec, limits, checkpoint)
        driver = Driver(runner, limits)
        other = driver.add([1, 2], SamplingParams(temperature=0.0))
        driver.step([(other, 2)])
        live = driver.add(list(range(20, 40)), SamplingParams(temperature=0.0, prompt_logprobs=0))
        for _ in range(5):
            assert driver.step([(other, 1), (live, 4)]).bad == []
        assert runner.pools.padding_intact()
        return torch.tensor([entry.logprob for entry in driver.prompt_logprobs[id(live)]])

    exact = scores("float32")
    close = scores(model, kv_dtype=kv, state_dtype=state, conv_dtype=model)
    assert len(exact) == len(close) == 19
    assert float((exact - close).abs().mean()) < 0.1 * float(exact.abs().mean())
    assert float((exact - close).abs().max()) > 0
