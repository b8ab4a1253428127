"""Words of a step: what kernels will read is what the plan says."""

import torch
from hybserve_kernels.rows import TILE

from hybserve.core.messages import SequenceStart, StepPlan
from hybserve.core.sampling import SamplingParams
from hybserve.plan.result import EngineLimits
from hybserve.runner.graphs import exact_room
from hybserve.runner.sequences import Sequences
from hybserve.runner.staging import Shape, Staging, make_step

LIMITS = EngineLimits(64, 40, 12, 6, 512, 512, 256, "float32", "float32", "float32")
WIDTH = 8


def plan_of_two_kinds() -> StepPlan:
    """Sequences 2 and 4 decode at 70 and 63; 1 prefills 130 tokens from 64 on, of which 64 lie in the gap, with
    checkpoints at 128 and 192; 3 prefills 5 tokens from 0 on."""
    return StepPlan(
        step=1, epoch=1, seqs=[2, 4, 1, 3], starts=[70, 63, 64, 0], counts=[1, 1, 130, 5], slots=[5, 6, 7, 8],
        tokens=[-1, -1, *range(130), *range(5)], page_rows=[0, 0, 1, 2, 2, 2, 2, 3],
        page_ids=[11, 12, 13, 14, 15, 16, 17, 18],
        sample_rows=[0, 1, 3], sample_seqs=[2, 4, 3], sample_outputs=[9, 8, 0], state_copies=[3, 7], page_copies=[],
        fork_seqs=[], fork_pages=[], freed=[], gap_rows=[2], gap_ends=[128],
        export_rows=[1, 2, 2], export_positions=[64, 128, 192], export_slots=[9, 10, 11],
    )  # fmt: skip


def send(shape_of) -> tuple:
    sequences, plan = Sequences("cpu", WIDTH), plan_of_two_kinds()
    starts = [SequenceStart(seq, 1, 0, SamplingParams(), [], 10, 0) for seq in (1, 2, 3, 4)]
    step = make_step(plan, *sequences.begin(plan, starts))
    staging = Staging(LIMITS, torch.device("cpu"))
    shape = shape_of(step.shape(LIMITS, scored=False))
    lists = staging.send(step, shape, sequences)
    tables = torch.zeros(LIMITS.max_running, WIDTH, dtype=torch.int32)
    tables.view(-1)[lists.table_places.long()] = lists.table_pages
    return staging, lists, *staging.views(shape, tables)


def test_rows_tiles_and_lists_say_what_the_plan_says() -> None:
    for shape_of in (
        lambda need: need,
        lambda need: exact_room(need, LIMITS, WIDTH),
        lambda _: Shape(512, 6, 6, 14, 8, 6),
    ):
        staging, lists, tokens, seqs, step = send(shape_of)
        assert step.tokens_1.tolist() == [137]
        assert tokens[:4].tolist() == [-1, -1, 0, 1]
        assert seqs[:3].tolist() == [2, 4, 1]
        assert step.positions_T[:4].tolist() == [70, 63, 64, 65]
        locations = step.locations_T.tolist()
        assert locations[:2] == [12 * 64 + 6, 13 * 64 + 63]
        assert locations[2:66] == [-1] * 64  # the gap
        assert locations[66:68] == [16 * 64, 16 * 64 + 1]
        assert locations[132:137] == [18 * 64 + offset for offset in range(5)]
        assert set(locations[137:]) <= {-1}
        decode, rows = step.decode, step.prefill
        assert decode.lengths_N[:2].tolist() == [71, 64]
        assert set(decode.lengths_N[2:].tolist()) <= {0}
        assert decode.slots_N[:2].tolist() == [5, 6]
        assert decode.tables_NM[0, :2].tolist() == [11, 12]
        assert rows.begins_R[:2].tolist() == [2, 132]
        assert rows.counts_R[:2].tolist() == [130, 5]
        assert set(rows.counts_R[2:].tolist()) <= {0}
        assert rows.starts_R[:2].tolist() == [64, 0]
        assert rows.tables_RM[0, :4].tolist() == [14, 15, 16, 17]
        assert rows.first_tiles_R[:2].tolist() == [0, 3]
        assert rows.tile_rows_X[:4].tolist() == [0, 0, 0, 1]
        assert set(rows.tile_rows_X[4:].tolist()) <= {-1}
        assert rows.tile_offsets_X[:4].tolist() == [0, TILE, 2 * TILE, 0]
        assert rows.exports_X[:4].tolist() == [10, 11, 0, 0]
        assert lists.state_copies_X2.tolist() == [[3, 7]]
        assert lists.state_exports_X2.tolist() == [[6, 9]]
        assert lists.exported_X.tolist() == [9, 10, 11]
        assert staging.sample_at[:3].tolist() == [0, 1, 3]
        last = step.last
        assert last.rows_1.tolist() == [4]
        assert last.at_N[:4].tolist() == [0, 1, 131, 136]
        assert last.positions_N[:4].tolist() == [70, 63, 193, 4]
        assert last.queries.lengths_N[:4].tolist() == [71, 64, 194, 5]
        assert set(last.queries.lengths_N[4:].tolist()) <= {0}
        assert last.queries.tables_NM[2, :4].tolist() == [14, 15, 16, 17]
        assert staging.sample_seqs.tolist() == [2, 4, 3, -1, -1, -1]
        assert staging.sample_outputs[:3].tolist() == [9, 8, 0]


def test_where_the_prompt_is_scored_samples_are_at_their_tokens() -> None:
    staging, _, _, _, step = send(lambda need: need._replace(last=0))
    assert step.last is None
    assert staging.sample_at[:3].tolist() == [0, 1, 136]


def test_an_empty_step_is_all_padding() -> None:
    staging = Staging(LIMITS, torch.device("cpu"))
    staging.device_words.fill_(7)
    shape = Shape(128, 6, 6, 8, WIDTH, 6)
    staging.send_empty(shape)
    tokens, _, step = staging.views(shape, torch.zeros(6, WIDTH, dtype=torch.int32))
    assert step.tokens_1.tolist() == [0]
    assert not tokens.any()
    assert set(step.locations_T.tolist()) == {-1}
    assert not step.decode.lengths_N.any()
    assert not step.last.rows_1.any()
    assert not step.last.queries.lengths_N.any()
    assert not step.prefill.counts_R.any()
    assert set(step.prefill.tile_rows_X.tolist()) == {-1}
    assert set(staging.sample_seqs.tolist()) == {-1}
