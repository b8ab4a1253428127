import time

from hybserve.observe.stages import Stages


def test_stages_follow_one_another_without_a_gap():
    began = time.monotonic() - 5
    stages = Stages(began)
    stages.lap("first")
    stages.lap("second")
    whole = time.monotonic() - began
    (first, one), (second, two) = stages.times
    assert (first, second) == ("first", "second")
    assert 5 <= one <= one + two <= whole
