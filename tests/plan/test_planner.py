import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybserve.config.deployment import Deployment
from hybserve.config.load import check_servable, load_deployment
from hybserve.core.errors import ConfigError, ModelError
from hybserve.plan.facts import MemoryFacts
from hybserve.plan.planner import find_facts, make_plan, plan_deployment
from hybserve.plan.report import format_plan

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
QWEN = {
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
}
MODELS = {
    "/models/Qwen3.5-9B": QWEN
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
    "/models/Qwen3.6-27B": QWEN
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "/models/Qwen3.6-35B-A3B": QWEN
    | {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
TINY = {
    "model_type": "qwen3_5_text",
    "dtype": "float32",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def model_dir(tmp_path):
    def model_dir(config):
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        return path

    return model_dir


def test_there_are_deployments_to_plan():
    assert {path.name for path in CONFIGS} >= {"embedded.yaml", "qwen3.5-9b-h200.yaml", "qwen3.6-27b-pp3.yaml"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_deployment_of_the_repository_plans(path, model_dir):
    named = load_deployment(path, (), {}).model.path
    directory = model_dir(MODELS.get(named, TINY))
    deployment = load_deployment(path, [f"model.path={directory}"], {})
    got = plan_deployment(deployment, MemoryFacts(find_facts(deployment).backend, 8 << 30))
    assert got.fits, format_plan(got)
    for key in ("max_running", "max_seq_len", "step_tokens"):
        if deployment.stated(f"engine.{key}"):
            assert getattr(got.engine, key) == getattr(deployment.engine, key)
    if deployment.engine.backend == "cpu":
        check_servable(deployment, {})


def test_golden_pipeline_from_its_file(model_dir):
    directory = model_dir(MODELS["/models/Qwen3.6-27B"])
    got = plan_deployment(load_deployment(ROOT / "configs/qwen3.6-27b-pp3.yaml", [f"model.path={directory}"], {}))
    assert [(stage.layers, stage.recurrent_layers, stage.attention_layers) for stage in got.stages] == [
        (22, 17, 5), (21, 16, 5), (21, 15, 6),
    ]  # fmt: skip
    assert got.bytes.state_slot_per_layer == 817_152 * 4
    assert got.bytes.kv_per_token == 32_768
    assert [round(24 * stage.state_slot_bytes / 2**20) for stage in got.stages] == [1272, 1197, 1122]
    assert got.floors.state_slots == 24
    assert all(stage.pool_bytes + stage.weight_bytes < stage.device_bytes for stage in got.stages)


def test_a_config_file_alone_plans_as_its_directory(model_dir):
    directory = model_dir(TINY)
    plans = [
        plan_deployment(load_deployment(None, [f"model.path={path}", "memory.device=64MiB"], {}))
        for path in (directory, directory / "config.json")
    ]
    assert plans[0] == plans[1]
    assert plans[0].fits


def test_weights_that_are_not_the_models_are_refused(model_dir):
    directory = model_dir(TINY)
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    deployment = load_deployment(None, [f"model.path={directory}"], {})
    with pytest.raises(ModelError, match="lack"):
        plan_deployment(deployment)
    assert plan_deployment(load_deployment(None, [f"model.path={directory}", "model.load=dummy"], {})).fits


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ModelError):
        plan_deployment(load_deployment(None, [f"model.path={tmp_path / 'none'}"], {}))
    with pytest.raises(ConfigError, match=r"model\.path"):
        plan_deployment(load_deployment(None, (), {}))


def test_a_model_that_no_key_names(model_dir):
    assert plan_deployment(load_deployment(None, (), {}), path=model_dir(TINY)).fits


def test_facts_are_this_machine_unless_a_gpu_is_asked_for():
    assert find_facts(load_deployment(None, (), {})).backend == "cpu"
    assert find_facts(load_deployment(None, ["engine.backend=cuda"], {})) == MemoryFacts("cuda", 0)


def test_planning_a_large_model_is_quick_and_needs_no_torch(model_dir):
    """Two seconds are the promise; the bound here is a timeout, generous by ten."""
    directory = model_dir(MODELS["/models/Qwen3.6-35B-A3B"])
    code = (
        "import sys; from hybserve.config.load import load_deployment; from hybserve.plan.planner import *; "
        "from hybserve.plan.report import *; "
        f"d = load_deployment(None, ['model.path={directory}', 'engine.backend=cuda', 'memory.device=60GiB', "
        "'engine.max_running=512', 'engine.tensor_parallel=2', 'engine.pipeline_parallel=2'], {}); "
        "print(len(plan_json(plan_deployment(d)))); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("changes", "dims", "words"),
    [
        ({"cache.page_size": 48}, {"d": 256}, r"cache\.page_size: must be a multiple of 64 on a GPU, got 48"),
        ({}, {"d": 320}, r"head_dim up to 256, got 320"),
    ],
)
def test_what_the_gpu_kernels_cannot_do_is_refused(make_spec, changes, dims, words):
    spec = make_spec("ddda", H=4, J=2, **dims)
    values: dict = {"cache": {key.split(".")[1]: value for key, value in changes.items()}}
    with pytest.raises(ConfigError, match=words):
        make_plan(spec, Deployment.build(values), MemoryFacts("cuda", 1 << 36))
