"""Pools: sizes and places are the layout's, views alias the runs, padding and poison."""

import pytest
import torch

from hybserve.plan.layout import page_layout, slot_layout
from hybserve.runner.copies import copy_runs
from hybserve.runner.device_pools import DevicePools
from hybserve.spec.model_spec import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelSpec
from hybserve.spec.split import split_ranks

ATTEND, RECUR = LayerSpec("attention", "dense"), LayerSpec("gated_delta", "dense")


def spec(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        family="qwen3_5",
        vocab_size=50,
        hidden=16,
        ffn=16,
        layers=layers,
        attention=AttentionSpec(q_heads=6, kv_heads=3, head_dim=10, rotary_dim=4, rope_theta=1e4),
        gated_delta=GatedDeltaSpec(key_heads=3, value_heads=6, key_dim=5, value_dim=7, conv_width=4),
        moe=None,
        norm_eps=1e-6,
        tied=True,
        dtype="float32",
        max_seq_len=64,
    )


@pytest.mark.parametrize("dtypes", [("float32", "float32", "float32"), ("bfloat16", "float32", "bfloat16"),
                                    ("float8_e4m3fn", "bfloat16", "float16")])  # fmt: skip
@pytest.mark.parametrize("degrees", [(1, 1), (3, 1), (2, 2)])
def test_views_cover_the_runs_without_overlap(make_limits, dtypes, degrees):
    """Every element of every view gets its own number; all survive, and they stand where plan/layout.py says."""
    model = spec(RECUR, ATTEND, RECUR, ATTEND, RECUR)
    kv, state, conv = dtypes
    limits = make_limits(kv_dtype=kv, state_dtype=state, conv_dtype=conv, kv_pages=5, state_slots=4)
    for share in split_ranks(model, *degrees):
        pools = DevicePools(model, share, limits)
        pages, slots = page_layout(model, share, 4, kv), slot_layout(model, share, state, conv)
        assert pools.page_pool_bytes == 5 * pages.page_bytes
        assert pools.slot_pool_bytes == 4 * slots.slot_bytes
        views = [*pools.kv_layers, *pools.matrices, *pools.windows]
        for number, view in enumerate(views, 1):
            view.fill_(number)
        for number, view in enumerate(views, 1):
            assert bool((view.float() == number).all())
        for layer, view in enumerate(pools.kv_layers):
            place = view[3].data_ptr() - pools.pages.data_ptr()
            assert place == 3 * pages.page_bytes + layer * pages.layer_bytes
        for layer, (matrix, window) in enumerate(zip(pools.matrices, pools.windows, strict=True)):
            place = matrix[2].data_ptr() - pools.slots.data_ptr()
            assert place == 2 * slots.slot_bytes + layer * slots.layer_bytes
            assert window[2].data_ptr() - matrix[2].data_ptr() == slots.window_offset


def test_ranks_without_a_kind_of_layer_have_empty_pools_peer64(make_limits):
    attends = DevicePools(spec(ATTEND), split_ranks(spec(ATTEND))[0], make_limits())
    recurs = DevicePools(spec(RECUR), split_ranks(spec(RECUR))[0], make_limits())
    assert (attends.slot_pool_bytes, attends.matrices, attends.windows) == (0, [], [])
    assert (recurs.page_pool_bytes, recurs.kv_layers) == (0, [])
    for pools in (attends, recurs):
        assert pools.padding_intact()
        copy_runs(pools.pages, [1, 2])
        copy_runs(pools.slots, [1, 2])
        pools.poison_pages([1])
        pools.poison_slots([1])


def test_canary_is_nan_in_every_type_and_notices_writes(make_limits):
    model = spec(RECUR, ATTEND)
    share = split_ranks(model)[0]
    for kv in ("float32", "bfloat16", "float16", "float8_e4m3fn"):
        pools = DevicePools(model, share, make_limits(kv_dtype=kv, conv_dtype="bfloat16"))
        for view in (*pools.kv_layers, *pools.matrices, *pools.windows):
            assert bool(torch.isnan(view[0].float()).all())
        assert pools.padding_intact()
        pools.kv_layers[0][0, 0, 0, 0, 0] = 1
        assert not pools.padding_intact()


def test_poisoned_pools_start_as_nan(make_limits):
    model = spec(RECUR, ATTEND)
    pools = DevicePools(model, split_ranks(model)[0], make_limits(), poisoned=True)
    assert bool(torch.isnan(pools.matrices[0]).all())
    assert pools.padding_intact()


def test_copies_move_whole_runs(make_limits):
    model = spec(RECUR, ATTEND)
    pools = DevicePools(model, split_ranks(model)[0], make_limits())
    pools.pages[1:] = torch.randint(0, 255, pools.pages[1:].shape, dtype=torch.uint8)
    before = pools.pages.clone()
    copy_runs(pools.pages, [3, 5, 3, 6, 4, 7])
    expected = before.clone()
    expected[5], expected[6], expected[7] = before[3], before[3], before[4]
    assert torch.equal(pools.pages, expected)


@pytest.mark.parametrize("pairs", [[1, 2, 3, 2], [1, 2, 2, 3], [1, 0], [1]])
def test_ambiguous_copies_are_refused(make_limits, pairs):
    model = spec(RECUR, ATTEND)
    pools = DevicePools(model, split_ranks(model)[0], make_limits())
    with pytest.raises(AssertionError):
        copy_runs(pools.pages, pairs)


def test_offsets_beyond_32_bits(make_limits):
    """A pool above 4 GiB is only mapped, not touched: its last page still has its own bytes."""
    model = spec(ATTEND)
    share = split_ranks(model)[0]
    page_bytes = page_layout(model, share, 64, "float32").page_bytes
    count = (5 << 30) // page_bytes
    pools = DevicePools(model, share, make_limits(page_size=64, kv_pages=count))
    pools.kv_layers[0][count - 1] = 3.0
    assert pools.padding_intact()
    assert float(pools.kv_layers[0][count - 1].amin()) == 3.0
