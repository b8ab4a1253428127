import pytest

from hybserve.plan.costs import Dtypes, StepShape, checkpoint_cost_tokens, matrix_flops, model_bytes, transients
from hybserve.plan.result import ModelBytes
from hybserve.spec.split import split_ranks

BF16 = Dtypes("bfloat16", "bfloat16", "float32", "bfloat16")
SHAPE = StepShape(max_running=64, max_seq_len=32768, step_tokens=8192, prefill_chunk=8192)

#: PEERS.md 3b, the qwen rows: layers, kv heads, value heads -> state MiB, KV KiB per token, the same in tokens.
ROWS = {
    "Qwen3.5-0.8B": (24, 2, 16, 18.6, 12, 1.6),
    "Qwen3.5-4B": (32, 4, 32, 49.1, 32, 1.6),
    "Qwen3.5-9B": (32, 4, 32, 49.1, 32, 1.6),
    "Qwen3.5-27B": (64, 4, 48, 146.8, 64, 2.3),
    "Qwen3.5-35B-A3B": (40, 2, 32, 61.4, 20, 3.1),
    "Qwen3.5-122B-A10B": (48, 2, 64, 146.5, 24, 6.3),
    "Qwen3.5-397B-A17B": (60, 2, 64, 183.2, 30, 6.3),
    "Qwen3-Next-80B-A3B": (48, 2, 32, 73.7, 24, 3.1),
}


@pytest.mark.parametrize("name", ROWS)
def test_state_and_kv_of_public_models(make_spec, name):
    layers, kv_heads, value_heads, state, kv, tokens = ROWS[name]
    spec = make_spec("ddda" * (layers // 4), H=2 * kv_heads, J=kv_heads, d=256, I=16, U=value_heads, K=128, V=128)
    sizes = model_bytes(spec, BF16)
    assert round(sizes.state_slot / 2**20, 1) == state
    assert sizes.kv_per_token == kv * 1024
    assert round(sizes.state_slot / sizes.kv_per_token / 1000, 1) == tokens


def test_golden_bytes_of_the_whole_model(golden_spec):
    full = model_bytes(golden_spec, Dtypes("bfloat16", "float8_e4m3fn", "float32", "float32"))
    assert full == ModelBytes(state_slot=48 * 817_152 * 4, state_slot_per_layer=817_152 * 4, kv_per_token=32_768)
    half = model_bytes(golden_spec, Dtypes("bfloat16", "bfloat16", "bfloat16", "bfloat16"))
    assert half.state_slot == 78_446_592


def test_products_of_a_token(make_spec):
    spec = make_spec("ddda" * 8, D=4096, F=12288, C=248320, H=16, J=4, d=256, I=16, U=32, K=128, V=128)
    assert matrix_flops(spec) == pytest.approx(13.84e9, rel=1e-3)


def test_models_with_one_kind_of_layer(make_spec):
    assert model_bytes(make_spec("aaa"), BF16).state_slot == 0
    assert model_bytes(make_spec("ddd"), BF16).kv_per_token == 0


@pytest.mark.parametrize(
    ("state", "kv", "page", "tokens"),
    [(1000, 10, 4, 100), (1001, 10, 4, 104), (1000, 10, 64, 128), (5, 10, 64, 64), (0, 10, 64, 64), (9, 0, 64, 64)],
)
def test_what_a_checkpoint_costs_in_tokens(state, kv, page, tokens):
    assert checkpoint_cost_tokens(ModelBytes(state, state, kv), page) == tokens


def total(spec, shape=SHAPE, share=None, cuda=True):
    return transients(spec, share or split_ranks(spec)[0], shape, BF16, 64, cuda)


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("field", ["max_running", "max_seq_len", "step_tokens", "prefill_chunk"])
def test_a_step_never_costs_less_when_a_number_grows(make_spec, cuda, field):
    spec, costs = make_spec(), []
    for value in (64, 128, 1024, 8192):
        values = {"max_running": 8, "max_seq_len": 8192, "step_tokens": 8192, "prefill_chunk": 64} | {field: value}
        costs.append(total(spec, StepShape(**values), cuda=cuda).total)
    assert costs == sorted(costs)


def test_peer61_scan_scratch_counts_the_state_before_every_tile(golden_spec):
    scan = total(golden_spec).scan
    states = 8192 // 64 * 48 * 128 * 128 * 2
    assert scan > states


def test_only_the_last_stage_makes_logits(golden_spec):
    first, middle, last = split_ranks(golden_spec, 1, 3)
    assert total(golden_spec, share=first).logits == total(golden_spec, share=middle).penalties == 0
    assert total(golden_spec, share=last).logits > 0


def test_logits_are_bounded_by_their_slice(golden_spec):
    many = StepShape(max_running=4096, max_seq_len=32768, step_tokens=65536, prefill_chunk=65536)
    most = StepShape(max_running=8192, max_seq_len=32768, step_tokens=131072, prefill_chunk=131072)
    assert total(golden_spec, many).logits == total(golden_spec, most).logits < 1 << 30


def test_collectives_cost_only_where_there_are_several_ranks(golden_spec):
    one, two = split_ranks(golden_spec)[0], split_ranks(golden_spec, 2)[0]
    assert total(golden_spec, share=two).workspaces > total(golden_spec, share=one).workspaces
    assert total(golden_spec, share=one, cuda=False).workspaces == 0


def test_layers_of_one_kind_need_no_scratch_of_the_other(make_spec):
    assert total(make_spec("aaa"), cuda=False).scan == 0
    assert total(make_spec("ddd"), cuda=False).attention == 0
    assert total(make_spec("aaa"), cuda=False).attention > 0
    assert total(make_spec("dda", mlp="moe"), cuda=False).activations > 0
