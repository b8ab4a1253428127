"""Whatever is written, loading ends in a Deployment that reads back the same, or in one ConfigError."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybserve.config.deployment import Deployment
from hybserve.config.describe import show
from hybserve.config.keys import KEYS
from hybserve.config.load import load_deployment
from hybserve.core.errors import ConfigError

QUIET = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.sampled_from(
    ["auto", "1", "0", "-1", "64K", "8GiB", "30s", "90%", "true", "no", "1e6", "1e400", "~", "''", "a b", "[a, b]",
     "[]", "{a: 1}", "fp32", "bf16", "cuda", "off", "0.0.0.0", "&x 1", "*x", "!!str 1", "9" * 5000, "\u00e9", "12:30",
     ".nan", "[" * 3000]
)  # fmt: skip
KEYS_AND_OTHERS = st.sampled_from([*KEYS, "engine", "engine.x", "x", "", ".", "cache.file", "engine.seed.x"])


def outcome(*args):
    try:
        return load_deployment(*args)
    except ConfigError:
        return None


@QUIET
@given(st.lists(st.tuples(KEYS_AND_OTHERS, SCALARS), max_size=4))
def test_any_overrides(tmp_path, pairs):
    got = outcome(None, [f"{key}={value}" for key, value in pairs], {})
    if got is not None:
        assert Deployment.from_json(got.to_json()) == got
        (tmp_path / "x.yaml").write_text(show(got))
        again = load_deployment(tmp_path / "x.yaml", (), {})
        assert all(again.value(key) == got.value(key) for key in KEYS)


@QUIET
@given(st.text(alphabet="engi:seld \n-[]{}'\"#&*!|>%@`~0.,\t\x00\u00e9", max_size=60))
def test_any_text(tmp_path, text):
    (tmp_path / "x.yaml").write_bytes(text.encode())
    outcome(tmp_path / "x.yaml", (), {})


@QUIET
@given(st.binary(max_size=40))
def test_any_bytes(tmp_path, content):
    (tmp_path / "x.yaml").write_bytes(content)
    outcome(tmp_path / "x.yaml", (), {})


@QUIET
@given(st.dictionaries(KEYS_AND_OTHERS.map(lambda key: "HYBSERVE__" + key.upper().replace(".", "__")), SCALARS))
def test_any_environment(environ):
    outcome(None, (), environ)


def test_nesting_without_end_is_an_error(tmp_path):
    (tmp_path / "x.yaml").write_text("a: " + "[" * 20000)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_deployment(tmp_path / "x.yaml", (), {})
