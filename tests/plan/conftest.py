import pytest

from hybserve.config.deployment import Deployment
from hybserve.plan.facts import MemoryFacts
from hybserve.plan.planner import make_plan
from hybserve.spec.model_spec import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelSpec, MoeSpec


def build_spec(mixers="dddadddaddda", mlp="dense", dtype="float32", max_seq_len=4096, **dims):
    """``mixers``: one letter a layer, d = gated delta, a = attention. Dims by DESIGN's letters."""
    given = {"D": 64, "F": 128, "C": 256, "H": 4, "J": 2, "d": 16, "I": 2, "U": 4, "K": 16, "V": 16, "W": 4} | dims
    return ModelSpec(
        family="qwen3_5" if mlp == "dense" else "qwen3_5_moe",
        vocab_size=given["C"],
        hidden=given["D"],
        ffn=given["F"] if mlp == "dense" else 0,
        layers=tuple(LayerSpec("gated_delta" if letter == "d" else "attention", mlp) for letter in mixers),
        attention=AttentionSpec(given["H"], given["J"], given["d"], 2, 1e4) if "a" in mixers else None,
        gated_delta=GatedDeltaSpec(given["I"], given["U"], given["K"], given["V"], given["W"])
        if "d" in mixers
        else None,
        moe=None if mlp == "dense" else MoeSpec(8, 2, 32, 32),
        norm_eps=1e-6,
        tied=False,
        dtype=dtype,
        max_seq_len=max_seq_len,
    )


@pytest.fixture
def make_spec():
    return build_spec


@pytest.fixture
def golden_spec():
    """64 layers, every fourth full attention: the shape of the golden numbers (a 27B model)."""
    dims = {"D": 5120, "F": 17408, "C": 248320, "H": 24, "J": 4, "d": 256, "I": 16, "U": 48, "K": 128, "V": 128}
    return build_spec("ddda" * 16, dtype="bfloat16", max_seq_len=262144, **dims)


@pytest.fixture
def plan_of():
    """``plan_of(spec, device, **{"engine.max_running": 4, ...})`` on a fake machine with a lot of free memory."""

    def plan_of(spec, device=None, free=1 << 40, weights=None, **stated):
        values: dict = {}
        if device is not None:
            stated["memory.device"] = device
        for key, value in stated.items():
            section, name = key.split(".")
            values.setdefault(section, {})[name] = value
        deployment = Deployment.build(values)
        facts = MemoryFacts("cuda" if deployment.engine.backend == "cuda" else "cpu", free)
        if weights is None:
            return make_plan(spec, deployment, facts)
        return make_plan(spec, deployment, facts, weights)

    return plan_of
