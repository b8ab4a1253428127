import pytest

from hybserve.config.deployment import Deployment
from hybserve.config.describe import explain, schema, show
from hybserve.config.keys import KEYS, SECTIONS
from hybserve.config.load import load_deployment
from hybserve.core.errors import ConfigError

STATED = [
    "model.path=/m/with space: and colon",
    "model.served_name=[no, 'x y']",
    "server.host=::1",
    "server.drain_timeout=1500ms",
    "server.max_body=100000",
    "engine.max_seq_len=1000000",
    "engine.max_running=1500",
    "memory.device=139GiB",
    "memory.kv_dtype=fp8",
    "cache.prefix=false",
]


@pytest.mark.parametrize("origin", [False, True])
def test_what_show_prints_loads_again_to_the_same(tmp_path, origin):
    deployment = load_deployment(None, STATED, {})
    path = tmp_path / "x.yaml"
    path.write_text(show(deployment, origin))
    again = load_deployment(path, (), {})
    assert {key: again.value(key) for key in KEYS} == {key: deployment.value(key) for key in KEYS}


def test_origins_stand_beside_the_values():
    lines = show(load_deployment(None, ["engine.seed=3"], {"HYBSERVE__SERVER__PORT": "9"}), origin=True).splitlines()
    assert any(line.split() == ["seed:", "3", "#", "--set"] for line in lines)
    assert any(line.split() == ["port:", "9", "#", "HYBSERVE__SERVER__PORT"] for line in lines)
    assert any(line.split() == ["max_queue:", "256", "#", "default"] for line in lines)
    assert "is not set" in show(Deployment())


def test_explain_every_key():
    for key in KEYS:
        text = explain(key)
        assert KEYS[key].description in text
        assert f"--set {key}=VALUE" in text
    text = explain("engine.max_running")
    assert "a count such as 64K, between 1 and 64K, or auto" in text
    assert "default  auto" in text
    assert "HYBSERVE__ENGINE__MAX_RUNNING" in text
    assert "only the default is accepted" in explain("cache.host")
    assert "one of none, vllm" in explain("metrics.compat")
    assert "true or false" in explain("server.insecure")
    assert "a name or a list" in explain("model.served_name")


def test_explain_a_section_lists_its_keys():
    for section in SECTIONS:
        assert len(explain(section).splitlines()) == sum(key.startswith(f"{section}.") for key in KEYS)


def test_explain_an_unknown_key_suggests_one():
    with pytest.raises(ConfigError, match=r"did you mean cache\.page_size"):
        explain("cache.pagesize")


def test_schema_knows_every_key_and_no_other():
    whole = schema()
    found = set()

    def walk(rule, prefix):
        assert rule["additionalProperties"] is False
        for name, child in rule["properties"].items():
            if "$ref" in child:
                walk(whole["$defs"][child["$ref"].rpartition("/")[2]], f"{prefix}{name}.")
            else:
                found.add(prefix + name)
                assert child["description"]

    walk(whole, "")
    assert found == set(KEYS)
    running = whole["$defs"]["EngineSection"]["properties"]["max_running"]
    assert running["default"] == "auto"
    assert {"const": "auto"} in running["anyOf"]
    assert "fp8" in whole["$defs"]["MemorySection"]["properties"]["kv_dtype"]["enum"]
    assert "default" not in whole["$defs"]["ServerSection"]["properties"]["api_key_env"]
