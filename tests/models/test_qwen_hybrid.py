"""The model against transformers, and against itself however a sequence is cut, mixed and placed.

All pools start as NaN everywhere, padding included. G tokens per page.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

from hybserve.layers.step_context import StepContext
from hybserve.models.base import Model
from hybserve.models.load import dummy_weights, load_weights
from hybserve.models.registry import build_model
from hybserve.plan.result import EngineLimits
from hybserve.runner.device_pools import DevicePools
from hybserve.runner.inputs import page_tiles, tile_context
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.inventory import params_of
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import split_ranks
from tests.checkpoints import SHAPES, load_reference, make_checkpoint
from tests.poison import poison_empty

torch.set_num_threads(1)
Cuts = list[int]

#: Shapes whose configuration differs in what is computed (the others differ in names only).
COMPUTED = [shape for shape in SHAPES if not shape.startswith("multimodal")]
TOLERANCE = 1e-4  # of the row's largest |logit|


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)


class Pair(NamedTuple):
    spec: ModelSpec
    model: Model
    oracle: Any


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    built: dict[tuple[str, str], Pair] = {}

    def pair(shape: str, dtype: str = "float32") -> Pair:
        if (shape, dtype) not in built:
            path = make_checkpoint(tmp_path_factory.mktemp(f"{shape}-{dtype}"), shape, dtype=dtype)
            spec = read_model_spec(path)
            share = split_ranks(spec)[0]
            model = build_model(spec, share, getattr(torch, dtype))
            load_weights(path, spec, share, model.params)
            built[shape, dtype] = Pair(spec, model, load_reference(path))
        return built[shape, dtype]

    return pair


def limits(page_size: int, pages: int, slots: int, dtype: str = "float32") -> EngineLimits:
    return EngineLimits(
        page_size=page_size,
        kv_pages=pages,
        state_slots=slots,
        max_running=slots - 1,
        max_seq_len=4096,
        step_tokens=4096,
        prefill_chunk=4096,
        kv_dtype=dtype,
        state_dtype="float32",
        conv_dtype=dtype,
    )


@dataclass
class Bench:
    """A model with pools of its own: sequences that are fed in pieces, several at a time."""

    model: Model
    page_size: int = 4
    pages: int = 300
    slots: int = 12
    dtype: str = "float32"
    seed: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bounds = limits(self.page_size, self.pages, self.slots, self.dtype)
        self.pools = DevicePools(self.model.spec, self.model.share, bounds, poisoned=True)
        self.free_pages = list(range(1, self.pages))
        self.free_slots = list(range(1, self.slots))
        self.random = random.Random(self.seed)
        self.random.shuffle(self.free_pages)
        self.random.shuffle(self.free_slots)
        self.owned: dict[int, int] = {}

    def grow(self, seq: int, length: int) -> None:
        if seq not in self.owned:
            self.owned[seq] = self.free_slots.pop()
        table = self.tables.setdefault(seq, [])
        while len(table) * self.page_size < length:
            table.append(self.free_pages.pop())

    def free(self, seq: int) -> None:
        """Give pages and slot back, overwritten with NaN."""
        self.pools.poison_pages(self.tables[seq])
        self.pools.poison_slots([self.owned[seq]])
        self.free_pages += self.tables.pop(seq)
        self.free_slots.append(self.owned.pop(seq))
        del self.lengths[seq]

    def step(self, rows: list[tuple[int, torch.Tensor]], hidden_TD: torch.Tensor | None = None) -> list[torch.Tensor]:
        """One forward over (sequence, its next tokens); the hidden states of every row."""
        starts = [self.lengths.get(seq, 0) for seq, _ in rows]
        counts = [len(tokens) for _, tokens in rows]
        for (seq, _), start, count in zip(rows, starts, counts, strict=True):
            self.grow(seq, start + count)
            self.lengths[seq] = start + count
        hidden = self.model.forward(
            torch.cat([tokens for _, tokens in rows]), self.context([seq for seq, _ in rows], starts, counts), hidden_TD
        )
        return list(hidden.split(counts))

    def context(self, seqs: list[int], starts: list[int], counts: list[int]) -> StepContext:
        tables = [self.tables[seq] for seq in seqs]
        slots = [self.owned[seq] for seq in seqs]
        positions = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        locations = [
            torch.tensor(table)[position // self.page_size] * self.page_size + position % self.page_size
            for table, position in zip(tables, positions, strict=True)
        ]
        return StepContext(
            bounds=[0, *torch.tensor(counts).cumsum(0).tolist()],
            starts=starts,
            slots=slots,
            block_tables=tables,
            page_size=self.page_size,
            positions_T=torch.cat(positions),
            locations_T=torch.cat(locations),
            slots_N=torch.tensor(slots),
            kv_layers=self.pools.kv_layers,
            matrices=self.pools.matrices,
            windows=self.pools.windows,
        )

    def logits(self, seq: int, ids: torch.Tensor, cuts: Cuts) -> torch.Tensor:
        """Of a whole sequence, fed piece by piece, alone."""
        hidden = [self.step([(seq, ids[a:b])])[0] for a, b in pairwise(cuts)]
        return self.model.logits(torch.cat(hidden))


def tokens(spec: ModelSpec, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def expected(pair: Pair, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = pair.oracle(ids[None], use_cache=False).logits[0]
    return logits


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference in units of its row's largest |logit|."""
    assert bool(got.isfinite().all())
    return float(((got - want).abs().amax(-1) / want.abs().amax(-1)).max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("poisoned_empty")
def test_logits_are_those_of_transformers_whole_and_in_pieces(pairs: Any, shape: str) -> None:
    pair = pairs(shape)
    ids = tokens(pair.spec, 75)
    want = expected(pair, ids)
    bench = Bench(pair.model)
    assert error(bench.logits(0, ids, [0, 75]), want) < TOLERANCE
    assert error(bench.logits(1, ids, [0, 1, 2, 10, 11, 12, 44, 60, *range(61, 76)]), want) < TOLERANCE
    assert bench.pools.padding_intact()


@pytest.mark.parametrize("count", [1, 2, 63, 65, 500])
@pytest.mark.parametrize("page_size", [4, 7, 64])
@pytest.mark.usefixtures("poisoned_empty")
def test_awkward_lengths_and_pages(pairs: Any, count: int, page_size: int) -> None:
    pair = pairs("odd")
    ids = tokens(pair.spec, count)
    bench = Bench(pair.model, page_size=page_size)
    want = expected(pair, ids)
    assert error(bench.logits(0, ids, [0, count]), want) < TOLERANCE
    assert error(bench.logits(1, ids, sorted({0, count // 3, count // 2, count})), want) < TOLERANCE


@pytest.mark.parametrize("shape", ["dense", "odd", "bias", "next_mixed", "no_attention", "no_recurrent"])
@pytest.mark.usefixtures("poisoned_empty")
def test_mixed_rows_and_reused_slots_and_pages_compute_what_each_computes_alone(pairs: Any, shape: str) -> None:
    """peer16 peer17 peer20 peer27: random steps of decode and prefill rows in any order; whatever a sequence frees is
    NaN until another owns it."""
    pair = pairs(shape)
    chance = random.Random(1)
    bench = Bench(pair.model, pages=80, slots=6)
    running: dict[int, torch.Tensor] = {}
    got: dict[int, list[torch.Tensor]] = {}
    started = 0
    while started < 14 or running:
        while started < 14 and len(running) < 5:
            running[started] = tokens(pair.spec, chance.choice([1, 2, 5, 18, 33]) + 6, started)
            started += 1
        rows = []
        for seq in chance.sample(sorted(running), chance.randint(1, len(running))):
            done, total = bench.lengths.get(seq, 0), len(running[seq])
            rows.append((seq, running[seq][done : done + chance.choice([1, 1, 3, total])]))
        for (seq, _), hidden in zip(rows, bench.step(rows), strict=True):
            got.setdefault(seq, []).append(pair.model.logits(hidden))
        for seq, ids in list(running.items()):
            if bench.lengths.get(seq) == len(ids):
                assert error(torch.cat(got[seq]), expected(pair, ids)) < TOLERANCE
                bench.free(seq)
                del running[seq]
    assert bench.pools.padding_intact()


@pytest.mark.usefixtures("poisoned_empty")
def test_decode_of_many_uneven_rows(pairs: Any) -> None:
    pair = pairs("dims")
    bench = Bench(pair.model)
    prompts = {seq: tokens(pair.spec, length, seq) for seq, length in enumerate([3, 9, 30, 31, 32, 70, 8])}
    bench.step([(seq, ids[:-2]) for seq, ids in prompts.items()])
    for cut in (-2, -1):
        rows = [(seq, ids[cut : len(ids) + cut + 1]) for seq, ids in prompts.items()]
        hidden = torch.cat(bench.step(rows))
        want = torch.stack([expected(pair, ids[: len(ids) + cut + 1])[-1] for ids in prompts.values()])
        assert error(pair.model.logits(hidden), want) < TOLERANCE


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_a_row_that_is_not_finite_spoils_no_other(pairs: Any, shape: str) -> None:
    """F50: its batch mates keep their values (exactly, unless experts now run over other numbers of tokens)."""
    pair = pairs(shape)
    prompts = [tokens(pair.spec, length, length) for length in (9, 14, 6)]
    clean, spoiled = Bench(pair.model), Bench(pair.model)
    for bench in (clean, spoiled):
        bench.step([(seq, ids[:-1]) for seq, ids in enumerate(prompts)])
    spoiled.pools.poison_slots([spoiled.owned[1]])
    want, got = (bench.step([(seq, ids[-1:]) for seq, ids in enumerate(prompts)]) for bench in (clean, spoiled))
    assert bool(got[1].isnan().any())
    for seq in (0, 2):
        if shape == "dense":
            assert torch.equal(got[seq], want[seq])
        torch.testing.assert_close(got[seq], want[seq], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stages", "shape"), [(2, "dense"), (3, "tied"), (3, "next_mixed"), (3, "full_rotary")])
def test_stages_one_after_another_are_the_whole(pairs: Any, stages: int, shape: str) -> None:
    pair = pairs(shape)
    ids = tokens(pair.spec, 23)
    benches = []
    for share in split_ranks(pair.spec, pipeline_parallel=stages):
        model = build_model(pair.spec, share, torch.float32)
        for name, param in model.params.items():
            param.copy_(pair.model.params[name])
        benches.append(Bench(model))
    got = []
    for a, b in pairwise([0, 5, 6, 22, 23]):
        hidden = None
        for bench in benches:
            hidden = bench.step([(0, ids[a:b])], hidden)[0]
        assert hidden is not None
        got.append(benches[-1].model.logits(hidden))
    assert error(torch.cat(got), expected(pair, ids)) < TOLERANCE


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (1, 3), (2, 1), (3, 2), (5, 1)])
def test_parameters_are_those_of_the_inventory(pairs: Any, ranks: int, stages: int) -> None:
    shapes = ["uneven"] if ranks == 5 else COMPUTED
    for shape in shapes:
        spec = pairs(shape).spec
        delta, attention = spec.gated_delta, spec.attention
        if (
            (delta and ranks > delta.key_heads)
            or (attention and ranks > attention.q_heads)
            or stages > len(spec.layers)
        ):
            continue
        for share in split_ranks(spec, ranks, stages):
            model = build_model(spec, share, torch.bfloat16)
            want = {
                param.name: (param.local_shape(share), torch.float32 if param.dtype == "float32" else torch.bfloat16)
                for param in params_of(spec, share)
            }
            assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.params.items()} == want


def test_more_than_one_tensor_rank_is_refused_by_name(pairs: Any) -> None:
    spec = pairs("dense").spec
    bench = Bench(build_model(spec, split_ranks(spec, 2)[0], torch.float32))
    dummy_weights(bench.model.params, 0)
    with pytest.raises(NotImplementedError, match="tensor_parallel 2"):
        bench.step([(0, tokens(spec, 3))])


@pytest.mark.parametrize("shape", ["dense", "moe", "odd"])
def test_bf16_stays_as_close_to_fp32_as_transformers_does(pairs: Any, shape: str) -> None:
    pair = pairs(shape, "bfloat16")
    ids = tokens(pair.spec, 70)
    exact = expected(pair, ids)
    theirs = expected(Pair(pair.spec, pair.model, _in_bf16(pair.oracle)), ids).float()
    pair.oracle.float()
    bench = Bench(pair.model, dtype="bfloat16")
    for seq, cuts in enumerate([[0, 70], [0, 33, 60, *range(61, 71)]]):
        got = bench.logits(seq, ids, cuts)
        assert got.dtype == torch.float32
        spread = ((got - exact).abs().amax(-1) / exact.abs().amax(-1)).median()
        assert spread < 1.5 * ((theirs - exact).abs().amax(-1) / exact.abs().amax(-1)).median()


def _in_bf16(oracle: Any) -> Any:
    """As from_pretrained would load it: gates stay in fp32 where the checkpoint's are rounded already."""
    return oracle.bfloat16()


def tiled(bench: Bench, seq: int, ids: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The deterministic mode as the runner drives it: one forward per page that a chunk touches."""
    out = []
    bench.grow(seq, len(ids))
    for start, end in pairwise(cuts):
        for page, low, high in page_tiles(start, end - start, bench.page_size):
            base = page * bench.page_size
            tile = torch.zeros(bench.page_size, dtype=torch.int64)
            tile[low:high] = ids[base + low : base + high]
            table, slot = bench.tables[seq], bench.owned[seq]
            context = tile_context(table, slot, page, (low, high), bench.pools, bench.page_size, False)
            hidden = bench.model.forward(tile, context)
            out.append(bench.model.logits(hidden, deterministic=True)[low:high].clone())
    return torch.cat(out)


def contents(bench: Bench, seq: int, length: int) -> list[torch.Tensor]:
    """States and KV of a sequence."""
    states = [pool[bench.owned[seq]].clone() for pool in bench.pools.matrices + bench.pools.windows]
    kv = [layer[bench.tables[seq]].permute(1, 2, 0, 3, 4).flatten(2, 3) for layer in bench.pools.kv_layers]
    return states + [both[:, :, :length].clone() for both in kv]


@pytest.mark.parametrize(
    ("shape", "page_size", "length"),
    [
        ("dense", 4, 27),
        ("dense", 64, 70),
        ("odd", 16, 35),
        ("dims", 4, 14),
        ("bias", 7, 23),
        ("moe", 16, 35),
        ("next_mixed", 4, 14),
        ("no_attention", 4, 14),
        ("no_recurrent", 4, 14),
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_deterministic_tiles_give_the_same_bits_however_a_sequence_is_cut(
    pairs: Any, shape: str, page_size: int, length: int
) -> None:
    pair = pairs(shape)
    ids = tokens(pair.spec, length)
    chance = random.Random(page_size)
    whole: Cuts = [0, length]
    ways = [whole, list(range(length + 1)), whole, [0, *sorted(chance.sample(range(1, length), 9)), length]]
    first: tuple[torch.Tensor, list[torch.Tensor]] | None = None
    for way, cuts in enumerate(ways):
        torch.set_num_threads(1 + way // 2)
        bench = Bench(pair.model, page_size=page_size, seed=way)
        got = tiled(bench, 0, ids, cuts), contents(bench, 0, length)
        assert bench.pools.padding_intact()
        if first is None:
            first = got
            assert error(got[0], expected(pair, ids)) < TOLERANCE
        assert torch.equal(got[0], first[0])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got[1], first[1], strict=True))
    torch.set_num_threads(1)


def test_bound_parameters_follow_a_later_change_only_after_bind(pairs: Any) -> None:
    spec = pairs("dense").spec
    model = build_model(spec, split_ranks(spec)[0], torch.float32)
    dummy_weights(model.params, 0)
    before = Bench(model).step([(0, tokens(spec, 4))])[0]
    for parameter in model.params.values():
        parameter.mul_(1.5)
    model.bind()
    assert not torch.equal(Bench(model).step([(0, tokens(spec, 4))])[0], before)
