import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybserve.config.quantity import BYTES, COUNT, INTEGER, SECONDS, Quantity


@pytest.mark.parametrize(
    ("unit", "written", "value"),
    [
        (COUNT, "64K", 65536),
        (COUNT, 1e6, 1000000),
        (COUNT, 7, 7),
        (BYTES, "8GiB", 8 << 30),
        (BYTES, "1.5 GiB", 3 << 29),
        (BYTES, "8GB", 8_000_000_000),
        (BYTES, 512, 512),
        (SECONDS, "30s", 30.0),
        (SECONDS, "500ms", 0.5),
        (SECONDS, "2m", 120.0),
        (SECONDS, 1.5, 1.5),
        (INTEGER, 2**63 - 1, 2**63 - 1),
    ],
)
def test_written_forms(unit, written, value):
    assert Quantity(unit).parse(written) == value


@pytest.mark.parametrize("written", [True, None, "auto", "abc", [1], "1.5", "-1", -1, "8XB", "12:30", float("inf")])
def test_refused_forms(written):
    with pytest.raises(ValueError, match=r"."):
        Quantity(COUNT).parse(written)


def test_auto_reads_as_none_only_where_allowed():
    assert Quantity(COUNT, auto=True).parse("auto") is None
    assert Quantity(COUNT, auto=True).show(None) == "auto"


def test_the_limit_stands_in_the_message():
    with pytest.raises(ValueError, match="must be between 1KiB and 1GiB, got 2GiB"):
        Quantity(BYTES, 1024, 1 << 30).parse("2GiB")
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        Quantity(COUNT, 1).parse(0)


@given(st.integers(0, 2**62), st.sampled_from([COUNT, BYTES, INTEGER]))
def test_shown_integers_parse_back(value, unit):
    quantity = Quantity(unit)
    shown = quantity.show(value)
    assert quantity.parse(int(shown) if shown.isdigit() else shown) == value


@given(st.floats(0, 1e6, allow_nan=False).map(lambda value: round(value, 3)))
def test_shown_seconds_parse_back(value):
    assert Quantity(SECONDS).parse(Quantity(SECONDS).show(value)) == value
