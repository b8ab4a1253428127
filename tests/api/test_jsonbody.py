"""Strict JSON bodies (F20 to F26)."""

import json

import pytest

from hybserve.api.jsonbody import parse_object
from hybserve.core.errors import RequestError


def refused(raw: bytes) -> str | None:
    with pytest.raises(RequestError) as caught:
        parse_object(raw)
    assert caught.value.body.status == 400
    assert caught.value.body.code == "invalid_value"
    caught.value.body.message.encode()
    return caught.value.body.param


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"  ", b"null", b"[]", b'"x"', b"1", b"{", b'{"a":1}x', b'{"a":1}{"b":2}', b"{'a':1}", b'{"a":}',
        b'{"a":1,}', b"\xef\xbb\xbf{}", b'{"a":"\xff"}', b'{"a":"\xed\xa0\x80"}', '{"a":1}'.encode("utf-16"),
        b'{"a":"\n"}', b"{a:1}",
    ],
)  # fmt: skip
def test_f20_not_a_json_object(raw):
    refused(raw)


@pytest.mark.parametrize("raw", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' + b"[" * 65 + b"]" * 65 + b"}"])
def test_f21_deep_nesting(raw):
    refused(raw)


def test_f21_depth_64_and_brackets_in_strings_are_fine():
    assert parse_object(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}")
    text = "[{" * 500 + '\\"[['
    assert parse_object(json.dumps({"a": text}).encode())["a"] == text


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e400", b"1" + b"0" * 400 + b".0"])
def test_f22_non_finite_numbers(literal):
    assert refused(b'{"a":{"b":[1,' + literal + b"]}}") == "a.b[1]"


@pytest.mark.parametrize("raw", [b'{"a":NaN,}', b'{"a":NaN,"b":' + b"9" * 5000 + b"}", b'{"a":NaN,"a":1}'])
def test_f22_non_finite_and_broken_otherwise(raw):
    refused(raw)


def test_f22_large_but_finite_is_fine():
    assert parse_object(b'{"a":1e300}')["a"] == 1e300


def test_f23_integer_of_5000_digits():
    refused(b'{"a":' + b"9" * 5000 + b"}")


def test_f23_minus_zero_is_no_integer():
    value = parse_object(b'{"a":-0,"b":5,"c":-0.5}')
    assert isinstance(value["a"], float)
    assert value["b"] == 5
    assert value["c"] == -0.5


def test_duplicate_keys():
    assert refused(b'{"a":1,"b":{"c":1,"c":2}}') == "c"


@pytest.mark.parametrize("raw", [rb'{"a":"x\ud800y"}', rb'{"a":"x\uDFFFy"}', rb'{"a":"x\ud800\ud800"}'])
def test_f26_lone_surrogates_are_refused_with_path_and_offset(raw):
    with pytest.raises(RequestError) as caught:
        parse_object(raw)
    assert caught.value.body.param == "a"
    assert "character 1" in caught.value.body.message


def test_f26_surrogate_in_a_key():
    refused(rb'{"\ud800":1}')


@pytest.mark.parametrize("text", ["\0", "￾", "‮", "e" + "\u0301" * 10_000, "👩‍👩‍👧‍👦" * 100, "😀"])
def test_f26_odd_but_valid_text_survives(text):
    for ascii_only in (True, False):
        assert parse_object(json.dumps({"a": text}, ensure_ascii=ascii_only).encode()) == {"a": text}


def test_f28_a_million_objects_are_refused_before_they_are_built() -> None:
    with pytest.raises(RequestError) as refused:
        parse_object(b'{"messages":[' + b",".join([b"{}"] * 300_000) + b"]}")
    assert "250000 objects and lists" in refused.value.body.message
