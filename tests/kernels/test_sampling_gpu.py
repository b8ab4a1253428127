"""Sampling on the device against its specification: the same tokens, whatever the filters cut and however many tie."""

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from hybserve_kernels.sampling import (
    Filters,
    SamplingTable,
    add_bias_,
    draw,
    gather_tokens,
    greedy_rows,
    logprob_rows,
    mask_,
    penalise_,
    position_key,
    remember,
    sample_rows,
    stream_key,
    token_logprobs,
)
from hybserve_kernels.sampling.gpu.noise import gumbel as device_gumbel
from hybserve_kernels.sampling.gpu.noise import gumbel_about
from hybserve_kernels.sampling.gpu.noise import position_key as device_position_key
from hybserve_kernels.sampling.noise import gumbel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Wishes:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()


def logits(rows: int, vocab: int, seed: int = 0, step: float | None = None, scale: float = 2.0) -> torch.Tensor:
    """Random logits; ``step`` rounds them to multiples of it, so that ties abound."""
    values = scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return values if step is None else (values / step).round() * step


def specified(row_C: torch.Tensor, wishes: Wishes, stream: int, position: int, prompt=(), output=()) -> int:
    """The token by the reference, one row at a time on the CPU."""
    if not bool(torch.isfinite(row_C).all()):
        return 0
    row_1C = row_C.float().cpu().clone()[None]
    zero = torch.zeros(1, dtype=torch.int64)
    if (wishes.repetition_penalty, wishes.presence_penalty, wishes.frequency_penalty) != (1.0, 0.0, 0.0):
        ids = sorted({*prompt, *output})
        penalise_(
            row_1C,
            zero.expand(len(ids)),
            torch.tensor(ids),
            torch.tensor([list(output).count(token) for token in ids]),
            torch.tensor([wishes.repetition_penalty]),
            torch.tensor([wishes.presence_penalty]),
            torch.tensor([wishes.frequency_penalty]),
        )
    for token, bias in wishes.logit_bias:
        add_bias_(row_1C, zero, zero + token, torch.tensor([bias]))
    if position < wishes.min_tokens:
        for token in wishes.stop_ids:
            mask_(row_1C, zero, zero + token)
    if wishes.temperature == 0.0:
        return int(row_1C.argmax())
    filters = Filters([wishes.temperature], [wishes.top_k], [wishes.top_p], [wishes.min_p])
    return int(draw(row_1C, filters, [position_key(stream, position)]))


def sampled(logits_RC: torch.Tensor, wishes: list[Wishes], positions: list[int]) -> list[int]:
    """Tokens of the device, one sequence a row, and not in order."""
    rows, vocab = logits_RC.shape
    table = SamplingTable(rows + 3, vocab, DEVICE)
    seqs = [rows + 2 - row for row in range(rows)]
    for seq, wish in zip(seqs, wishes, strict=True):
        table.set(seq, wish, stream_key(seq, 1))
    tokens, finite = sample_rows(logits_RC.to(DEVICE), ints(seqs), ints(positions), table)
    assert bool(finite.all())
    assert tokens.dtype == torch.int64
    return tokens.tolist()


def check(logits_RC: torch.Tensor, wishes: list[Wishes]) -> None:
    rows = logits_RC.shape[0]
    positions = [3 * row for row in range(rows)]
    expected = [
        specified(logits_RC[row], wishes[row], stream_key(rows + 2 - row, 1), positions[row]) for row in range(rows)
    ]
    assert sampled(logits_RC, wishes, positions) == expected


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 4096, 4097, 9001])
def test_greedy_rows_is_the_lowest_id_of_the_largest(vocab, dtype):
    wide = logits(5, vocab + 13, seed=vocab, step=0.5).to(dtype).to(DEVICE)
    rows = wide[:, :vocab]
    rows[4] = float("-1e4")
    tokens, finite = greedy_rows(rows)
    assert tokens.tolist() == rows.float().cpu().argmax(-1).tolist()
    assert finite.dtype == torch.bool
    assert bool(finite.all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 4095, 4096, 5000])
def test_a_row_that_is_not_finite_gives_the_safe_token(bad, at):
    rows = logits(4, 5001, seed=1).to(DEVICE)
    rows[2, at] = bad
    table = SamplingTable(4, 5001, DEVICE)
    for seq, wishes in enumerate((Wishes(0.0), Wishes(), Wishes(top_k=5), Wishes(0.0))):
        table.set(seq, wishes, stream_key(seq, 0))
    for tokens, finite in (
        greedy_rows(rows),
        sample_rows(rows, ints([0, 1, 2, 3]), ints([0, 0, 0, 0]), table),
        sample_rows(rows, ints([0, 3, 1, 2]), ints([0, 0, 0, 0]), table),
    ):
        assert finite.tolist() == [True, True, False, True]
        assert int(tokens[2]) == 0


@triton.jit
def _noise_kernel(stream_ptr, positions_ptr, ids_ptr, out_ptr, about_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    key = device_position_key(tl.load(stream_ptr), tl.load(positions_ptr + tl.program_id(0)))
    ids = tl.load(ids_ptr + at)
    tl.store(out_ptr + tl.program_id(0) * COUNT + at, device_gumbel(key, ids))
    tl.store(about_ptr + tl.program_id(0) * COUNT + at, gumbel_about(key, ids))


def test_the_noise_is_that_of_the_specification():
    stream = stream_key(77, 3)
    ids = torch.randint(0, 1 << 20, (4096,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    positions = [0, 1, 4095, 2_000_000_000]
    out = torch.empty(len(positions), len(ids), dtype=torch.float64, device=DEVICE)
    about = torch.empty_like(out, dtype=torch.float32)
    signed = torch.tensor([stream - (1 << 64) if stream >> 63 else stream], device=DEVICE)
    _noise_kernel[(len(positions),)](signed, ints(positions), ids.to(DEVICE), out, about, len(ids))
    keys = torch.tensor([position_key(stream, position) for position in positions])
    torch.testing.assert_close(out.cpu(), gumbel(keys, ids.long()), rtol=1e-14, atol=1e-14)
    assert float((about - out).abs().max()) < 1e-4


KINDS = [
    Wishes(),
    Wishes(temperature=0.0),
    Wishes(temperature=0.7, top_k=20, top_p=0.8),
    Wishes(temperature=1e-3),
    Wishes(top_k=1),
    Wishes(temperature=1.5, top_p=0.95),
    Wishes(top_p=0.01),
    Wishes(top_p=0.5, min_p=0.02),
    Wishes(min_p=0.1),
    Wishes(temperature=0.3, top_k=50, min_p=0.3),
    Wishes(top_k=3, top_p=0.999, min_p=1.0),
    Wishes(temperature=1e-300, top_p=0.9),
    Wishes(temperature=50.0, top_k=1_000_000),
]


@pytest.mark.parametrize("step", [None, 0.5], ids=["smooth", "ties"])
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(7, torch.float32), (300, torch.bfloat16), (4500, torch.float32)], ids=str
)
def test_all_kinds_of_rows_in_one_launch(vocab, dtype, step):
    check(logits(len(KINDS), vocab, seed=vocab, step=step, scale=3.0).to(dtype), KINDS)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (2, 1.0), (3, 1.0), (0, 0.5), (0, 0.3), (600, 0.25)])
def test_ties_at_the_edge_keep_the_lower_ids(top_k, top_p):
    """Two levels of equal logits; the higher one weighs exactly 1 each, so that sums are exact."""
    rows = torch.full((2, 4500), -40.0)
    rows[:, 1::5] = 2.0
    check(rows.bfloat16(), [Wishes(top_k=top_k, top_p=top_p)] * 2)


@pytest.mark.parametrize(
    "wishes",
    [Wishes(top_p=0.99), Wishes(top_k=4500), Wishes(top_k=4800, top_p=0.9), Wishes(top_p=0.9999, min_p=0.5),
     Wishes(temperature=1e4, top_p=0.7)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("step", [None, 0.25], ids=["smooth", "ties"])
def test_flat_rows_are_searched(wishes, step):
    check(logits(1, 5000, seed=5, step=step, scale=0.3), [wishes])


def test_all_logits_equal():
    check(torch.zeros(4, 4200), [Wishes(), Wishes(top_p=0.37), Wishes(top_k=11), Wishes(top_k=4100, top_p=0.3)])


def test_the_two_zeros_are_equal():
    rows = torch.full((3, 300), -1.0)
    rows[:, 100::3], rows[:, 101::3] = 0.0, -0.0
    check(rows, [Wishes(0.0), Wishes(top_k=2), Wishes(top_k=40)])


def test_stop_ids_are_masked_until_enough_tokens_exist():
    rows = logits(4, 500, seed=3)
    best = rows.argsort(dim=-1, descending=True)[:, :3].tolist()
    wishes = [
        Wishes(0.0, min_tokens=4, stop_ids=tuple(best[0])),  # position 0
        Wishes(0.0, min_tokens=4, stop_ids=tuple(best[1])),  # position 3
        Wishes(0.0, min_tokens=6, stop_ids=tuple(best[2])),  # position 6: free
        Wishes(top_k=2, min_tokens=100, stop_ids=tuple(best[3])),
    ]
    check(rows, wishes)
    assert sampled(rows, wishes, [0, 3, 6, 9])[2] == best[2][0]


def test_biases_are_added():
    rows = logits(4, 5000, seed=4)
    biases = tuple((token, 100.0 if token == 4999 else 0.25 * (token % 7) - 1) for token in range(0, 5000, 17))
    many = ((4999, 100.0), *biases)
    check(rows, [Wishes(0.0, logit_bias=biases), Wishes(logit_bias=biases), Wishes(top_p=0.9, logit_bias=biases),
                 Wishes(0.0, logit_bias=many, min_tokens=50, stop_ids=(4999, 3))])  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_penalties_follow_the_history_and_what_is_sampled(dtype):
    vocab, prompt, output = 300, [5, 5, 7, 250], [7, 9]
    base = Wishes(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
    wishes = [base, replace(base, temperature=0.0), replace(base, top_k=8), replace(base, top_p=0.9),
              Wishes(0.0), replace(base, temperature=0.0, repetition_penalty=1.0)]  # fmt: skip
    rows = len(wishes)
    table = SamplingTable(rows, vocab, DEVICE)
    for seq, wish in enumerate(wishes):
        table.set(seq, wish, stream_key(seq, 0), prompt, output)
    outputs = [list(output) for _ in wishes]
    for step in range(4):
        values = logits(rows, vocab, seed=step, step=0.5).to(dtype)
        tokens, _ = sample_rows(values.to(DEVICE), ints(list(range(rows))), ints([2 + step] * rows), table)
        for seq, wish in enumerate(wishes):
            expected = specified(values[seq], wish, stream_key(seq, 0), 2 + step, prompt, outputs[seq])
            assert int(tokens[seq]) == expected, f"step {step}, sequence {seq}"
            outputs[seq].append(expected)


def test_an_index_starts_anew_without_its_predecessor():
    values = logits(1, 200, seed=1)
    table = SamplingTable(2, 200, DEVICE, counts=True)
    first = Wishes(0.0, presence_penalty=50.0, logit_bias=((3, 100.0),))
    table.set(1, first, stream_key(1, 0), prompt=[1], output=list(range(150)))
    second = Wishes(0.0, presence_penalty=1.0)
    table.set(1, second, stream_key(1, 0), prompt=list(range(200)))
    tokens, _ = sample_rows(values.to(DEVICE), ints([1]), ints([0]), table)
    assert tokens.tolist() == values.argmax(-1).tolist()


def test_padding_rows_are_left_alone():
    values = logits(4, 300, seed=9).to(DEVICE)
    values[1] = float("nan")
    table = SamplingTable(4, 300, DEVICE)
    table.set(2, Wishes(), stream_key(0, 0))
    before = table.records_S.clone()
    tokens, finite = sample_rows(values, ints([2, -1, -1, -1]), ints([5, -7, 0, 0]), table)
    assert tokens.tolist() == [specified(values[0].cpu(), Wishes(), stream_key(0, 0), 5), 0, 0, 0]
    assert bool(finite.all())
    assert torch.equal(table.records_S, before)


def test_too_many_listed_tokens_are_refused():
    table = SamplingTable(1, 5000, DEVICE)
    with pytest.raises(ValueError, match="1300 stop ids and biases"):
        table.set(0, Wishes(logit_bias=tuple((token, 1.0) for token in range(1300))), 1)


@pytest.mark.parametrize("top", [0, 1, 5, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_are_those_of_the_reference(top, dtype):
    rows = logits(3, 300, seed=2, step=0.5).to(dtype)
    tokens = torch.tensor([0, 299, 17])
    own, values, ids = logprob_rows(rows.to(DEVICE), tokens.to(DEVICE), top)
    expected = token_logprobs(rows, tokens, top)
    torch.testing.assert_close(own.cpu(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.cpu(), expected[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(ids.cpu(), expected[2])


@pytest.mark.parametrize("count", [1, 300])
def test_the_token_pool_gives_back_what_was_sampled(count):
    pool = torch.arange(1000, 1000 + count, device=DEVICE)
    remember(
        pool, ints([0, -1, count - 1] if count > 1 else [0, -1]), torch.arange(7, 10 if count > 1 else 9).to(DEVICE)
    )
    expected = list(range(1000, 1000 + count))
    expected[0] = 7
    if count > 1:
        expected[count - 1] = 9
    assert pool.tolist() == expected
    tokens = ints([token if token % 3 else -1 for token in range(count)])
    ids = gather_tokens(tokens, ints(list(range(count))[::-1]), pool)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [token if token % 3 else expected[count - 1 - token] for token in range(count)]
