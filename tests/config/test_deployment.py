import json

import pytest
from pydantic import ValidationError

from hybserve.config.deployment import NOT_YET, Deployment


def problems(values):
    with pytest.raises(ValidationError) as caught:
        Deployment.build(values)
    return {key: what for error in caught.value.errors() for key, what in error["ctx"].get("problems", ())}


def test_defaults():
    deployment = Deployment()
    assert (deployment.server.host, deployment.server.port, deployment.server.max_queue) == ("127.0.0.1", 8000, 256)
    assert (deployment.server.drain_timeout, deployment.server.sse_ping) == (30.0, 10.0)
    assert deployment.server.max_body == 64 << 20
    assert deployment.memory.state_dtype == "float32"
    assert (deployment.cache.prefix, deployment.cache.page_size, deployment.cache.host) == (True, 64, 0)
    assert deployment.engine.max_running is None
    assert deployment.log.trace == "off"


def test_stated_and_defaulted_keys_are_told_apart():
    deployment = Deployment.build(
        {"engine": {"max_running": 16, "max_seq_len": "64K"}}, {"engine.max_running": "x.yaml:2"}
    )
    assert deployment.stated("engine.max_running")
    assert not deployment.stated("engine.seed")
    assert not deployment.stated("model.path")
    assert not deployment.stated("cache.file.size")
    assert deployment.origin("engine.max_running") == "x.yaml:2"
    assert deployment.origin("engine.max_seq_len") == "stated"
    assert deployment.origin("engine.seed") == "default"
    assert deployment.engine.max_seq_len == 65536


def test_json_round_trip_keeps_values_stated_keys_and_origins():
    deployment = Deployment.build(
        {
            "model": {"served_name": ["a", "b"], "dtype": "bf16"},
            "server": {"request_timeout": "90s", "host": "::1"},
            "engine": {"max_running": "auto", "deterministic": True},
            "memory": {"device": "139GiB", "kv_dtype": "fp8"},
        },
        {"memory.device": "--set"},
    )
    copy = Deployment.from_json(deployment.to_json())
    assert copy == deployment
    assert copy.stated("engine.max_running")
    assert not copy.stated("engine.seed")
    assert copy.origin("memory.device") == "--set"
    assert copy.memory.kv_dtype == "float8_e4m3fn"
    assert json.loads(deployment.to_json())["values"]["memory"]["device"] == 139 << 30


def test_sections_are_frozen_and_closed():
    deployment = Deployment()
    with pytest.raises(ValidationError):
        deployment.engine.seed = 3
    with pytest.raises(ValidationError):
        deployment.engine = deployment.engine
    with pytest.raises(ValidationError):
        Deployment.build({"engine": {"sed": 3}})
    with pytest.raises(KeyError):
        deployment.value("engine.sed")


def test_short_dtype_names():
    memory = {"kv_dtype": "fp16", "state_dtype": "bf16", "conv_dtype": "fp32"}
    built = Deployment.build({"memory": memory, "model": {"dtype": "half"}})
    assert (built.memory.kv_dtype, built.memory.state_dtype, built.memory.conv_dtype) == (
        "float16",
        "bfloat16",
        "float32",
    )
    assert built.model.dtype == "float16"


@pytest.mark.parametrize("key", NOT_YET)
def test_keys_without_a_feature_accept_only_their_default(key):
    value = {"engine.graphs": "on", "metrics.compat": "vllm", "log.trace": "on", "cache.file.path": "/x"}.get(key, 1)
    values: dict = {}
    at = values
    *sections, name = key.split(".")
    for section in sections:
        at = at.setdefault(section, {})
    at[name] = value
    assert "not available yet" in problems(values)[key]
    at[name] = NOT_YET[key]
    assert Deployment.build(values).value(key) == NOT_YET[key]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_an_open_address_needs_a_key_or_a_word(host):
    message = problems({"server": {"host": host}})["server.host"]
    assert "server.api_key_env" in message
    assert "server.insecure: true" in message
    Deployment.build({"server": {"host": host, "insecure": True}})
    Deployment.build({"server": {"host": host, "api_key_env": "KEY"}})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "[::1]"])
def test_loopback_needs_no_key(host):
    assert Deployment.build({"server": {"host": host}}).server.host == host


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"engine": {"deterministic": True}, "memory": {"state_dtype": "bf16"}}, "engine.deterministic"),
        ({"engine": {"deterministic": True, "tensor_parallel": 2}}, "engine.deterministic"),
        ({"engine": {"deterministic": True, "pipeline_parallel": 2}}, "engine.deterministic"),
        ({"engine": {"backend": "cuda"}, "cache": {"page_size": 48}}, "cache.page_size"),
        ({"engine": {"step_tokens": 32}}, "engine.step_tokens"),
        ({"engine": {"prefill_chunk": 100}}, "engine.prefill_chunk"),
        ({"engine": {"prefill_chunk": 512, "step_tokens": 256}}, "engine.prefill_chunk"),
        ({"cache": {"checkpoint_every": 100}}, "cache.checkpoint_every"),
    ],
)
def test_keys_that_contradict_each_other(values, key):
    assert key in problems(values)


def test_small_pages_are_fine_on_cpu():
    assert Deployment.build({"cache": {"page_size": 1}, "engine": {"step_tokens": 1}}).cache.page_size == 1
