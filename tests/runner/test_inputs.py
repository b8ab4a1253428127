"""From plans to packed tokens, positions, locations; tiles; no per-token Python."""

import numpy as np
import torch

from hybserve.core.messages import SequenceStart, StepPlan
from hybserve.core.sampling import SamplingParams
from hybserve.runner.inputs import Packed, packed_tokens, page_tiles, step_context
from hybserve.runner.sequences import Sequences, TokenCounts

GREEDY = SamplingParams(temperature=0.0)


def plan(rows: list[tuple[int, int, int, list[int]]], pages: list[tuple[int, int]], tokens: list[int]) -> StepPlan:
    seqs, starts, counts = ([row[column] for row in rows] for column in range(3))
    page_rows, page_ids = [row for row, _ in pages], [page for _, page in pages]
    slots = [row + 1 for row in range(len(rows))]
    return StepPlan(1, 1, seqs, starts, counts, slots, tokens, page_rows, page_ids, *([] for _ in range(8)))


def begin(sequences: Sequences, seqs: list[int], step: StepPlan) -> None:
    sequences.begin(step, [SequenceStart(seq, 1, 0, GREEDY, [], 4, 0) for seq in seqs])


def test_packing(runner_pools):
    sequences = Sequences()
    begin(sequences, [3, 0, 70], plan([(3, 0, 9, []), (0, 0, 3, []), (70, 0, 5, [])],
                                       [(0, 11), (2, 5), (0, 7), (1, 2), (0, 9), (2, 6)], []))  # fmt: skip
    sequences.remember([3, 70], torch.tensor([33, 77]))
    step = plan([(70, 5, 1, []), (0, 3, 3, []), (3, 9, 1, [])], [(1, 30)], [-1, 21, 22, 23, -1])
    begin(sequences, [], step)
    packed = Packed(step)
    assert packed_tokens(step, packed, sequences).tolist() == [77, 21, 22, 23, 33]
    context = step_context(step, packed, sequences, runner_pools, 4)
    assert context.bounds == [0, 1, 4, 5]
    assert context.positions_T.tolist() == [5, 3, 4, 5, 9]
    assert context.locations_T.tolist() == [6 * 4 + 1, 2 * 4 + 3, 30 * 4, 30 * 4 + 1, 9 * 4 + 1]
    assert context.slots_N.tolist() == [1, 2, 3]
    assert context.block_tables == [[5, 6], [2, 30], [11, 7, 9]]


def test_random_plans_equal_the_slow_way(runner_pools):
    random = np.random.default_rng(0)
    for _ in range(100):
        sequences, rows, pages = Sequences(), [], []
        for row in range(int(random.integers(1, 9))):
            start, count = int(random.integers(0, 20)), int(random.integers(1, 12))
            rows.append((row, start, count, []))
            pages += [(row, int(page)) for page in random.integers(1, 99, -(-(start + count) // 4))]
        random.shuffle(pages)
        tokens = random.integers(0, 9, sum(row[2] for row in rows)).tolist()
        step = plan(rows, pages, tokens)
        begin(sequences, list(range(len(rows))), step)
        context = step_context(step, Packed(step), sequences, runner_pools, 4)
        positions = [start + index for _, start, count, _ in rows for index in range(count)]
        tables = [[page for other, page in pages if other == row] for row in range(len(rows))]
        owners = [row for row, _, count, _ in rows for _ in range(count)]
        assert context.positions_T.tolist() == positions
        assert context.locations_T.tolist() == [
            tables[row][at // 4] * 4 + at % 4 for row, at in zip(owners, positions, strict=True)
        ]


def test_tiles_cover_every_position_once():
    for start in range(9):
        for count in range(1, 14):
            covered = [page * 4 + at for page, low, high in page_tiles(start, count, 4) for at in range(low, high)]
            assert covered == list(range(start, start + count))


def test_token_counts():
    counts = TokenCounts([5, 5, 7], [7, 9, 9])
    counts.add(5)
    for token in range(100, 200):
        counts.add(token)
    assert counts.counts[3:].tolist() == [1] * 100
    counts = TokenCounts([5, 5, 7], [7, 9, 9, 5])
    assert TokenCounts([], []).ids.tolist() == []
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {5: 1, 7: 1, 9: 2}
