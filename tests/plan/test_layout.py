import pytest

from hybserve.plan.layout import RUN_ALIGN, page_layout, slot_layout
from hybserve.spec.split import split_ranks, width

MIB = 1 << 20


def rounded_mib(count):
    return round(count / MIB)


def test_golden_state_of_one_layer(golden_spec):
    (share,) = split_ranks(golden_spec)
    layout = slot_layout(golden_spec, share, "float32", "float32")
    assert (layout.matrix_bytes, layout.window_bytes) == (786_432 * 4, 30_720 * 4)
    assert layout.layer_bytes == 817_152 * 4
    assert round(layout.layer_bytes / MIB, 4) == 3.1172
    assert layout.channels == 10_240


def test_golden_slots_of_a_pipeline_of_three(golden_spec):
    shares = split_ranks(golden_spec, 1, 3)
    slots = [slot_layout(golden_spec, share, "float32", "float32") for share in shares]
    pages = [page_layout(golden_spec, share, 64, "float8_e4m3fn") for share in shares]
    assert [width(share.layers) for share in shares] == [22, 21, 21]
    assert [layout.layers for layout in slots] == [17, 16, 15]
    assert [layout.layers for layout in pages] == [5, 5, 6]
    per_stage = [layout.slot_bytes for layout in slots]
    assert [rounded_mib(24 * each) for each in per_stage] == [1272, 1197, 1122]
    assert rounded_mib(24 * sum(per_stage)) == 3591
    assert rounded_mib(12 * sum(per_stage)) == 1796
    assert [rounded_mib((12 - 6) * each) for each in per_stage] == [318, 299, 281]


def test_golden_checkpoint_and_kv(golden_spec):
    (share,) = split_ranks(golden_spec)
    checkpoint = slot_layout(golden_spec, share, "bfloat16", "bfloat16").slot_bytes
    assert checkpoint == 78_446_592
    assert round(checkpoint / MIB, 1) == 74.8
    page = page_layout(golden_spec, share, 64, "float8_e4m3fn").page_bytes
    assert page == 64 * 32_768
    chunk = 4096 // 64 * page
    assert chunk == 128 * MIB
    assert round(100 * checkpoint / chunk) == 58


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8])
def test_peer69_uneven_ranks_cover_the_model_exactly(golden_spec, ranks):
    shares = split_ranks(golden_spec, ranks)
    whole = slot_layout(golden_spec, split_ranks(golden_spec)[0], "float32", "bfloat16").slot_bytes
    assert sum(slot_layout(golden_spec, share, "float32", "bfloat16").slot_bytes for share in shares) == whole
    replicas = max(1, ranks / 4)
    pages = sum(page_layout(golden_spec, share, 64, "bfloat16").page_bytes for share in shares)
    assert pages == page_layout(golden_spec, split_ranks(golden_spec)[0], 64, "bfloat16").page_bytes * replicas


def test_peer64_stages_without_attention_or_without_recurrence(make_spec):
    shares = split_ranks(make_spec("dddaaa"), 1, 2)
    pages = [page_layout(make_spec("dddaaa"), share, 16, "float32").page_bytes for share in shares]
    slots = [slot_layout(make_spec("dddaaa"), share, "float32", "float32").slot_bytes for share in shares]
    assert pages[0] == 0
    assert pages[1] > 0
    assert slots[0] > 0
    assert slots[1] == 0


def test_odd_shapes_are_aligned(make_spec):
    spec = make_spec("dda", I=3, U=9, K=5, V=7, W=3, H=3, J=3, d=6)
    (share,) = split_ranks(spec)
    slot = slot_layout(spec, share, "float32", "bfloat16")
    assert slot.matrix_bytes == 9 * 5 * 7 * 4
    assert slot.window_bytes == (2 * 3 * 5 + 9 * 7) * 2 * 2
    assert slot.window_offset % 16 == slot.layer_bytes % 16 == slot.slot_bytes % RUN_ALIGN == 0
    assert slot.layer_bytes >= slot.window_offset + slot.window_bytes
    page = page_layout(spec, share, 3, "float16")
    assert page.layer_bytes >= 2 * 3 * 3 * 6 * 2
    assert page.page_bytes % RUN_ALIGN == 0
