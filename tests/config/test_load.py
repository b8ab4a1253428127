import pytest

from hybserve.config.load import check_servable, load_deployment
from hybserve.core.errors import EXIT_USAGE, ConfigError


@pytest.fixture
def load(tmp_path):
    def load(text=None, sets=(), environ=None):
        path = None
        if text is not None:
            path = tmp_path / "x.yaml"
            path.write_text(text)
        return load_deployment(path, sets, environ or {})

    load.path = tmp_path / "x.yaml"
    return load


def errors(load, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(f"{load.path}:", "x.yaml:").splitlines()


def test_nothing_stated_is_all_defaults(load):
    deployment = load()
    assert not deployment.stated("engine.seed")
    assert deployment.server.port == 8000


def test_file_with_units(load):
    deployment = load(
        "engine:\n  max_seq_len: 64K\n  step_tokens: 1e3\nmemory:\n  device: 8GiB\nserver:\n  drain_timeout: 1m\n"
        "model:\n  served_name: [a, b]\n"
    )
    assert (deployment.engine.max_seq_len, deployment.engine.step_tokens) == (65536, 1000)
    assert deployment.memory.device == 8 << 30
    assert deployment.server.drain_timeout == 60.0
    assert deployment.model.served_name == ("a", "b")
    assert deployment.origin("memory.device") == f"{load.path}:5"


def test_precedence_set_over_environment_over_file_over_default(load):
    text = "engine:\n  max_running: 1\n  seed: 1\n  step_tokens: 64\n"
    environ = {"HYBSERVE__ENGINE__MAX_RUNNING": "2", "HYBSERVE__ENGINE__SEED": "2"}
    deployment = load(text, ["engine.max_running=3"], environ)
    engine = deployment.engine
    assert (engine.max_running, engine.seed, engine.step_tokens, engine.tensor_parallel) == (3, 2, 64, 1)
    assert deployment.origin("engine.max_running") == "--set"
    assert deployment.origin("engine.seed") == "HYBSERVE__ENGINE__SEED"
    assert deployment.origin("engine.step_tokens") == f"{load.path}:4"
    assert deployment.origin("engine.tensor_parallel") == "default"


def test_the_last_set_wins(load):
    assert load(None, ["engine.seed=1", "engine.seed=2"]).engine.seed == 2


def test_text_needs_no_quotes_outside_the_file(load):
    deployment = load(None, ["model.path=123"], {"HYBSERVE__SERVER__API_KEY_ENV": "NO"})
    assert deployment.model.path == "123"
    assert deployment.server.api_key_env == "NO"


def test_lists_outside_the_file(load):
    assert load(None, ["model.served_name=[a, 'b c']"]).model.served_name == ("a", "b c")
    assert load(None, ["model.served_name=a"]).model.served_name == ("a",)


def test_a_section_that_does_not_exist_is_named_with_its_own_line(load):
    assert errors(load, "model:\n  seed: 1\nservr:\n  port: 1\n") == [
        "x.yaml:3: servr: unknown key; did you mean server"
    ]


def test_all_errors_at_once_in_the_order_of_the_file(load):
    text = (
        "model:\n  path: 5\n  dtyp: bf16\nserver:\n  host: 0.0.0.0\n  port: 70000\n  insecure: no\n"
        "engine:\n  page_size: 3\n  backend: cud\n  seed: 1\n  seed: 2\ncache:\n  host: 1GiB\nmemory: 3\ntext:\n"
        "log:\n  level:\n"
    )
    got = errors(
        load, text, ["x", "engine.step_tokens=abc"], {"HYBSERVE__FOO__BAR": "1", "HYBSERVE__MODEL__SERVED_NAME": "[a"}
    )
    assert got[:12] == [
        "x.yaml:2: model.path: must be text, got 5; put it in quotes",
        "x.yaml:3: model.dtyp: unknown key; did you mean model.dtype",
        "x.yaml:5: server.host: 0.0.0.0 can be reached from other hosts and no API key is set; set server.api_key_env "
        "to the name of an environment variable that holds a key, or say server.insecure: true",
        "x.yaml:6: server.port: must be between 0 and 65535, got 70000",
        "x.yaml:7: server.insecure: must be true or false, got 'no'",
        "x.yaml:9: engine.page_size: unknown key; did you mean cache.page_size",
        "x.yaml:10: engine.backend: must be auto, cpu or cuda, got 'cud'; did you mean cuda",
        "x.yaml:12: engine.seed: stated twice, first in line 11",
        "x.yaml:14: cache.host: not available yet; leave it at its default (0)",
        "x.yaml:15: memory: is a section; write its keys below it",
        "x.yaml:18: log.level: has no value; write one or remove the line",
        "HYBSERVE__MODEL__SERVED_NAME: model.served_name: not a YAML value: expected ',' or ']', but got "
        "'<stream end>'",
    ]
    assert got[12:] == [
        "--set: x: expected section.key=value",
        "HYBSERVE__FOO__BAR: foo.bar: unknown key",
        "--set: engine.step_tokens: expected a count such as 64K, got 'abc'",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("engine.max_runing", "engine.max_running"),
        ("model.max_seq_len", "engine.max_seq_len"),
        ("max_running", "engine.max_running"),
        ("memry", "memory"),
        ("cache.file.pth", "cache.file.path"),
    ],
)
def test_did_you_mean(load, key, meant):
    assert errors(load, None, [f"{key}=1"]) == [f"--set: {key}: unknown key; did you mean {meant}"]


def test_nothing_is_guessed_for_what_resembles_nothing(load):
    assert errors(load, None, ["zzz.qqq=1"]) == ["--set: zzz.qqq: unknown key"]


def test_variables_beside_the_prefix_are_not_ours(load):
    assert load(None, (), {"HYBSERVE_HOME": "/x", "HYBSERV__A": "1", "PATH": "x"}) == load()


def test_a_file_that_is_not_there(load, tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_deployment(tmp_path / "none.yaml", (), {})


def test_a_file_that_is_not_text(load, tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"engine:\n \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_deployment(tmp_path / "x.yaml", (), {})


def test_broken_yaml_names_its_line(load):
    (line,) = errors(load, "engine:\n  seed: 1\n bad")
    assert line.startswith("x.yaml:3: not YAML: ")


def test_an_overridden_value_is_not_judged(load):
    assert load("engine:\n  max_running: 0\n", ["engine.max_running=4"]).engine.max_running == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine.tensor_parallel", "2"),
        ("engine.pipeline_parallel", "3"),
        ("memory.kv_dtype", "fp8"),
    ],
)
def test_what_can_be_planned_but_not_served(load, key, value):
    deployment = load(None, [f"{key}={value}"])
    with pytest.raises(ConfigError, match=rf"--set: {key}: .* can be planned but not served yet"):
        check_servable(deployment, {})


def test_api_keys_must_be_there_and_not_empty(load):
    deployment = load("server:\n  api_key_env: K\n  admin_api_key_env: A\n")
    with pytest.raises(ConfigError) as caught:
        check_servable(deployment, {"K": ""})
    assert str(caught.value).splitlines() == [
        f"{load.path}:2: server.api_key_env: the environment variable K is empty",
        f"{load.path}:3: server.admin_api_key_env: the environment variable A is not set",
    ]
    check_servable(deployment, {"K": "secret", "A": "other"})


def test_a_key_pasted_in_place_of_its_name_is_refused_and_not_repeated(load):
    assert errors(load, None, ["server.api_key_env=sk-secret"]) == [
        "--set: server.api_key_env: must be the name of an environment variable, not the key itself"
    ]


def test_the_default_deployment_is_servable(load):
    check_servable(load(), {})
