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
def test_built_runner_serves_and_counts_its_bytes(checkpoint, make_limits, load):
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


def test_model_that_computes_nan_is_refused(checkpoint, make_limits, monkeypatch):
    spec = read_model_spec(checkpoint)
    monkeypatch.setattr("hybserve.runner.main.load_weights", lambda *args: args[3]["norm.weight"].fill_(float("nan")))
    with pytest.raises(ModelError, match="finite"):
        build_runner(Deployment(), spec, make_limits(), checkpoint)
