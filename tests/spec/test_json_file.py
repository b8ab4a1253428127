from pathlib import Path

import pytest

from hybserve.core.errors import ModelError
from hybserve.spec.json_file import one_line, parse_object, read_capped, read_object, read_optional, shown


def test_reads_an_object(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, {"b": "ü"}], "a": 2}')
    assert read_object(tmp_path / "a.json") == {"a": 2}
    assert read_optional(tmp_path / "a.json") == {"a": 2}
    assert read_optional(tmp_path / "b.json") is None


def test_size_is_capped_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert read_capped(path, 2) == b"{}"
    with pytest.raises(ModelError, match=r"a\.json: 2 B, the limit is 1 B"):
        read_capped(path, 1)


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"a\.json: cannot be read \(Not a directory\)"):
        read_object(tmp_path / "file" / "a.json")


@pytest.mark.parametrize(
    "raw", ["NaN", '{"a": Infinity}', '{"a": -Infinity}', "{'a': 1}", '{"a": 1,}', "\ufeff{}", "1"]
)
def test_not_json(raw: str) -> None:
    with pytest.raises(ModelError, match=r"^x\.json: ") as error:
        parse_object(raw.encode(), "x.json")
    assert str(error.value).isprintable()


def test_repeated_keys() -> None:
    raw = b'{"a": {"c": 1, "b": 1, "c": 2}}'
    assert parse_object(raw, "x") == {"a": {"c": 2, "b": 1}}
    with pytest.raises(ModelError, match="key 'c' occurs twice"):
        parse_object(raw, "x", unique=True)


def test_values_in_messages_stay_short_and_printable() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown("x" * 10**6)) <= 80
    assert shown(10**5000) == "a number of more than 70 digits"
    assert shown([[1], 2]) == "a list of 2"
    assert shown({}) == "an object"
    assert one_line("a\x1bb\nc") == "a?b?c"
    assert one_line("abc", 2) == "a…"
