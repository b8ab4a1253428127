"""What must be reused of traces whose right answer is known, in small."""

import pytest

from bench import hits
from bench.hits import Figure


@pytest.mark.parametrize(
    "trace",
    [
        hits.chat,
        lambda: hits.system_prompt(4),
        lambda: hits.identical(2),
        lambda: hits.fluctuating(15),
        lambda: hits.long_path(25, slots=14),
        lambda: hits.concurrency(4, 3),
    ],
    ids=["chat_peer24_peer53", "system_prompt_peer43_peer44_peer56", "identical", "fluctuating", "long_path_peer47",
         "one_and_many"],
)  # fmt: skip
def test_known_traces_reuse_what_they_must_peer24_peer44_peer47_peer53_peer56_peer57(trace) -> None:
    figures = trace()
    assert figures
    assert [figure for figure in figures if not figure.good] == []
    assert sum(figure.got for figure in figures) > 0


def test_a_figure_below_its_expectation_is_not_good() -> None:
    assert not Figure("", 10, 3, 4).good
    assert Figure("", 10, 5, 4).good
    assert not Figure("", 10, 5, 4, exact=True).good
