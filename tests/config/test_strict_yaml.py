import pytest

from hybserve.config.strict_yaml import read_tree, read_value

SECTIONS = frozenset({"engine", "cache", "cache.file"})


def values(text):
    leaves, flaws = read_tree(text, SECTIONS)
    assert not flaws
    return {leaf.key: leaf.value for leaf in leaves}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1e6),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("12:30", "12:30"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("-3", -3),
        ("64K", "64K"),
        ("'5'", "5"),
        ("~", None),
        ("null", None),
        ("[a, 1, true]", ["a", 1, True]),
        ("", None),
        (".inf", ".inf"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    got = read_value(text)
    assert got == value
    assert type(got) is type(value)


def test_dotted_keys_with_their_lines():
    leaves, flaws = read_tree("engine:\n  seed: 1\n\ncache:\n  file:\n    path: /x\n", SECTIONS)
    assert not flaws
    assert [(leaf.key, leaf.value, leaf.line) for leaf in leaves] == [
        ("engine.seed", 1, 2),
        ("cache.file.path", "/x", 6),
    ]


def test_a_key_stated_twice_names_both_lines():
    _, flaws = read_tree("engine:\n  seed: 1\n  seed: 2\nengine:\n  x: 1\n", SECTIONS)
    assert [(flaw.key, flaw.what, flaw.line) for flaw in flaws] == [
        ("engine.seed", "stated twice, first in line 2", 3),
        ("engine", "stated twice, first in line 1", 4),
    ]


def test_an_empty_document_states_nothing():
    assert values("") == {}
    assert values("# only a comment\n") == {}


@pytest.mark.parametrize(
    "text",
    [
        "a: b: c",
        "\tx: 1",
        "a: [",
        "--- 1\n--- 2",
        "- 1",
        "plain",
        "a: *x",
        "a: \x00",
        "!!python/object:os.system x",
        "engine: !!python/object/apply:os.system [x]",
        "engine: !tag 3",
        "engine: &x [*x]",
        "? [1]\n: 2",
        "1: 2",
        "engine:\n  seed: {a: 1}",
        "engine:\n  seed: [[1]]",
        "engine:\n  seed: !!int x",
    ],
)
def test_everything_else_is_a_flaw_with_a_line(text):
    _, flaws = read_tree(text, SECTIONS)
    assert flaws
    assert all(flaw.line >= 1 and flaw.what and "\n" not in flaw.what for flaw in flaws)


@pytest.mark.parametrize("text", ["[a", "a: b: c", "{a: 1}", "--- 1\n--- 2", "[[1]]", "*x"])
def test_a_value_that_is_none_raises(text):
    with pytest.raises(ValueError, match=r"."):
        read_value(text)


def test_merge_keys_are_plain_unknown_keys():
    leaves, _ = read_tree("engine:\n  <<: 3\n", SECTIONS)
    assert leaves[0].key == "engine.<<"
