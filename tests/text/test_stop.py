from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybserve.text.stop import StopMatcher, StopStrings, stop_strings


def run(stops: tuple[str, ...], parts: list[str], include: bool = False) -> tuple[str, bool, int]:
    """(text shown, hit, parts consumed)."""
    matcher = StopMatcher(StopStrings(stops), include)
    shown = ""
    for count, part in enumerate(parts, 1):
        shown += matcher.push(part)
        if matcher.hit:
            return shown, True, count
    return shown + matcher.flush(), False, len(parts)


def reference(stops: tuple[str, ...], text: str, include: bool) -> tuple[str, bool]:
    """Shortest prefix that ends in a stop string, cut before the longest one that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - max(map(len, found))], True
    return text, False


def split(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


ALPHABET = st.sampled_from("ab🙂é")


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    text=st.text(ALPHABET, max_size=24),
    cuts=st.lists(st.integers(0, 30), max_size=10),
    include=st.booleans(),
)
def test_F32_peer74_any_split_gives_the_same_text(
    stops: tuple[str, ...], text: str, cuts: list[int], include: bool
) -> None:
    parts = split(text, cuts)
    shown, hit, count = run(stops, parts, include)
    expected, expected_hit = reference(stops, text, include)
    assert (shown, hit) == (expected, expected_hit)
    if hit:  # the part that completed it, not an earlier or a later one
        before, _ = reference(stops, "".join(parts[: count - 1]), True)
        assert before == "".join(parts[: count - 1])


@settings(max_examples=200, deadline=None)
@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    text=st.text(ALPHABET, max_size=24),
)
def test_F32_only_what_may_become_a_stop_string_is_held_back(stops: tuple[str, ...], text: str) -> None:
    matcher, seen, shown = StopMatcher(StopStrings(stops), False), "", ""
    for character in text:
        seen += character
        shown += matcher.push(character)
        if matcher.hit:
            return
        held = seen[len(shown) :]
        longest = max((k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])), default=0)
        assert len(held) == longest


@pytest.mark.parametrize("include", [False, True])
def test_F32_the_largest_allowed_set(include: bool) -> None:
    stops = tuple("🙂" * 60 + chr(97 + n) * 16 for n in range(16))
    assert all(len(stop.encode()) == 256 for stop in stops)
    text = "🙂" * 5000 + "p" * 16
    shown, hit, _ = run(stops, list(text), include)
    assert hit
    assert shown == (text if include else "🙂" * 4940)


def test_F32_work_is_linear_in_the_text() -> None:
    """Count the steps of the automaton: at most two for each character, for the worst of texts."""
    strings = StopStrings(tuple("a" * length + "b" for length in range(240, 256)))
    steps = state = 0
    for character in "a" * 3000 + "c" + "a" * 3000:
        while state and character not in strings.next[state]:
            state, steps = strings.fail[state], steps + 1
        state, steps = strings.next[state].get(character, 0), steps + 1
    assert steps <= 2 * 6001


def test_earliest_end_wins_then_the_longest() -> None:
    assert run(("abcd", "bc"), ["xabcd"]) == ("xa", True, 1)
    assert run(("b", "ab"), ["xab"]) == ("x", True, 1)


def test_compiled_sets_are_shared() -> None:
    assert stop_strings(("a", "b")) is stop_strings(("a", "b"))
