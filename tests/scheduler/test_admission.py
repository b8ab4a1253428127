import pytest

from hybserve.core.messages import Generate
from hybserve.core.sampling import SamplingParams
from hybserve.scheduler.admission import Door, pages_at_admission
from hybserve.scheduler.queues import Waiting
from hybserve.scheduler.request import Request
from tests.fakes import limits


def generate(prompt: int, max_tokens: int, n: int = 1) -> Generate:
    return Generate(1, [1] * prompt, SamplingParams(max_tokens=max_tokens), n, "", "", 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "code"),
    [
        (0, 4, 1, "invalid_value"),
        (4, 0, 1, "invalid_value"),
        (4, 4, 0, "invalid_value"),
        (100, 29, 1, "context_length_exceeded"),
        (100, 28, 1, None),
        (4, 4, 9, "exceeds_capacity"),
        (4, 4, 8, None),
    ],
)
def test_F55_the_door_refuses_what_can_never_run(prompt: int, max_tokens: int, n: int, code: str | None) -> None:
    refusal = Door(limits(), 10, None).refusal(generate(prompt, max_tokens, n), Waiting())
    assert (refusal and refusal.body.code) == code


def test_F55_the_last_token_sampled_needs_no_page() -> None:
    door = Door(limits(kv_pages=4), 10, None)
    assert door.refusal(generate(6, 7), Waiting()) is None
    refusal = door.refusal(generate(6, 8), Waiting())
    assert refusal is not None
    assert "4 KV pages" in refusal.body.message


def test_slots_bound_the_choices_too() -> None:
    refusal = Door(limits(state_slots=3), 10, None).refusal(generate(4, 4, 3), Waiting())
    assert refusal is not None
    assert "at most 2" in refusal.body.message


def test_retry_after_follows_what_the_last_admitted_had_to_wait() -> None:
    door = Door(limits(), 0, None)
    seconds = []
    for wait in (0.0, 2.3, 500.0):
        door.last_wait = wait
        refusal = door.refusal(generate(4, 4), Waiting())
        assert refusal is not None
        seconds.append(refusal.body.retry_after)
    assert seconds == [1, 3, 60]


@pytest.mark.parametrize(
    ("prompt", "generated", "max_tokens", "chunk", "pages"),
    [
        (6, 0, 20, 6, 3),  # two of the chunk and one to grow
        (30, 0, 20, 8, 3),
        (6, 0, 2, 6, 2),  # it never needs more
        (6, 9, 20, 8, 5),  # resumed: all of it and one to grow
    ],
)
def test_admission_takes_the_first_chunk_and_one_page(
    prompt: int, generated: int, max_tokens: int, chunk: int, pages: int
) -> None:
    lead = Request(generate(prompt, max_tokens)).sequences[0]
    lead.output = [1] * generated
    lead.fill = lead.length
    assert pages_at_admission(lead, chunk, 4) == pages
