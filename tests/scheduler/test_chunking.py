import pytest

from hybserve.scheduler.chunking import chunk_end


@pytest.mark.parametrize(
    ("start", "fill", "most", "end"),
    [
        (0, 10, 16, 10),  # the whole prompt
        (0, 10, 10, 10),
        (0, 10, 9, 8),  # cut at a page
        (4, 10, 3, 4),  # not even a page: nothing
        (8, 10, 2, 10),  # the rest of the prompt is less than a page
        (8, 10, 1, 8),
        (0, 10, 0, 0),
        (0, 10, -5, 0),
    ],
)
def test_a_chunk_ends_at_a_page_or_at_the_prompts_end(start: int, fill: int, most: int, end: int) -> None:
    assert chunk_end(start, fill, 4, most) == end


def test_chunks_of_any_budget_cover_every_prompt_once() -> None:
    for page in (1, 4, 5):
        for fill in range(1, 30):
            for most in range(page, 17):
                position = 0
                while position < fill:
                    end = chunk_end(position, fill, page, most)
                    assert position < end <= min(fill, position + most)
                    assert end == fill or end % page == 0
                    position = end
