"""I key heads, U value heads, K key dim, V value dim, W conv width, S slots. Slot 0 is a canary; windows that no row
may read, padding of the packed tokens and what the kernel must write are NaN before it runs."""

import pytest
import torch
from hybserve_kernels.causal_conv import conv_rows, conv_taps, reference
from hybserve_kernels.causal_conv.gpu import Shape
from hybserve_kernels.gated_delta import reference as gated_delta
from hybserve_kernels.rows import TILE, PrefillRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = [(1, 2, 16, 32), (1, 3, 32, 16), (2, 2, 24, 40)]
CLOSE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
NAN = float("nan")
SLOTS = 12


def _ints(values: list[int], size: int, rest: int) -> torch.Tensor:
    return torch.tensor(values + [rest] * (size - len(values)), dtype=torch.int32, device=DEVICE)


def _rows(
    begin: int, counts: list[int], starts: list[int], slots: list[int], exports: dict[tuple[int, int], int]
) -> PrefillRows:
    """``exports``: (row, tile of the row) to the slot of the checkpoint. Two rows and three tiles too many."""
    tiles = [(row, offset) for row, count in enumerate(counts) for offset in range(0, count, TILE)]
    rows, total = len(counts) + 2, len(tiles) + 3
    return PrefillRows(
        rows,
        total,
        _ints([begin + sum(counts[:row]) for row in range(len(counts))], rows, 1 << 30),
        _ints(counts, rows, 0),
        _ints(starts, rows, 0),
        _ints(slots, rows, 0),
        _ints([], rows, 1 << 30)[:, None],
        _ints([[row for row, _ in tiles].index(row) for row in range(len(counts))], rows, 0),
        _ints([row for row, _ in tiles], total, -1),
        _ints([offset for _, offset in tiles], total, 0),
        _ints([exports.get((row, offset // TILE), 0) for row, offset in tiles], total, 0),
    )


class Layer:
    """Weights, and packed tokens of which only [begin, end) belong to rows."""

    def __init__(self, heads: tuple[int, int, int, int], width: int, dtype: torch.dtype, begin: int, end: int) -> None:
        torch.manual_seed(0)
        key_heads, value_heads, key_dim, value_dim = self.heads = heads
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        tokens, columns = end + 3, self.channels + value_heads * (value_dim + 2)
        self.projected = torch.full((tokens, columns + 5), NAN, dtype=dtype, device=DEVICE)[:, :columns]
        self.projected[begin:end] = torch.randn(end - begin, columns, device=DEVICE).to(dtype)
        self.weight = torch.randn(self.channels, width, device=DEVICE).to(dtype)
        self.a_log, self.dt_bias = torch.randn(2, value_heads, device=DEVICE)
        pool = torch.full((SLOTS, 2, self.channels, width - 1), NAN, dtype=dtype, device=DEVICE)
        self.windows = pool[:, 1]
        self.qkv = torch.full((tokens, self.channels), NAN, dtype=dtype, device=DEVICE)
        self.g, self.beta = torch.full((2, tokens, value_heads), NAN, device=DEVICE)

    def run(self, rows: PrefillRows, shape: Shape | None = None) -> None:
        rate = -self.a_log.exp()
        taps = conv_taps(self.weight)
        outputs = (self.qkv, self.g, self.beta)
        conv_rows(self.projected, self.windows, taps, rate, self.dt_bias, self.heads, rows, *outputs, shape)

    def expected(
        self, own: slice, window: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of one row qkv, g, beta and the window after it."""
        key_heads, value_heads, key_dim, value_dim = self.heads
        x = self.projected[own]
        y, after = reference.causal_conv(x[:, : self.channels], window, self.weight)
        q, k, v = y.split_with_sizes([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=1)
        q, k = gated_delta.unit_queries_keys(q.unflatten(1, (key_heads, -1)), k.unflatten(1, (key_heads, -1)))
        b, a = x[:, self.channels + value_heads * value_dim :].split(value_heads, dim=1)
        g, beta = gated_delta.decay_and_strength(a, b, self.a_log, self.dt_bias)
        return torch.cat((q.flatten(1).to(x.dtype), k.flatten(1).to(x.dtype), v), dim=1), g, beta, after


def _close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = CLOSE[dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("heads", "width", "dtype", "shape"),
    [
        (HEADS[0], 4, torch.float32, None),
        (HEADS[0], 4, torch.bfloat16, Shape(64, 16, 2, True)),
        (HEADS[1], 2, torch.bfloat16, Shape(64, 8, 4, False)),
        (HEADS[2], 3, torch.float32, Shape(64, 4, 2, False)),
        (HEADS[0], 4, torch.bfloat16, Shape(32, 16, 1, False)),
    ],
)
def test_rows_are_the_reference(
    heads: tuple[int, int, int, int], width: int, dtype: torch.dtype, shape: Shape | None
) -> None:
    counts, starts, slots = [1, 130, 2, 64, 63], [0, 128, 64, 0, 64], [3, 1, 5, 7, 2]
    exports = {(1, 1): 8, (1, 2): 9, (3, 0): 10, (2, 0): 11}
    begin, end = 4, 4 + sum(counts)
    layer = Layer(heads, width, dtype, begin, end)
    for start, slot in zip(starts, slots, strict=True):
        if start:
            layer.windows[slot] = torch.randn(layer.windows.shape[1:], device=DEVICE).to(dtype)
    before = layer.windows.clone()
    layer.run(_rows(begin, counts, starts, slots, exports), shape)
    for row, (count, start, slot) in enumerate(zip(counts, starts, slots, strict=True)):
        own = slice(begin + sum(counts[:row]), begin + sum(counts[: row + 1]))
        window = before[slot] if start else torch.zeros_like(before[slot])
        qkv, g, beta, after = layer.expected(own, window)
        _close(layer.qkv[own], qkv, dtype)
        _close(layer.g[own], g, torch.float32)
        _close(layer.beta[own], beta, dtype)
        assert torch.equal(layer.windows[slot], after)
        for (of, tile), target in exports.items():
            if of == row:
                stop = own.start + min((tile + 1) * TILE, count)
                assert torch.equal(layer.windows[target], layer.expected(slice(own.start, stop), window)[3])
    untouched = [slot for slot in range(SLOTS) if slot not in {*slots, *exports.values()}]
    assert layer.windows[untouched].isnan().all()
    for written in (layer.qkv, layer.g, layer.beta):
        assert written[:begin].isnan().all()
        assert written[end:].isnan().all()


def test_pieces_are_the_whole() -> None:
    """A row in pieces through its slot, down to pieces shorter than the window, gives the same bits."""
    whole, pieces = (Layer(HEADS[0], 4, torch.bfloat16, 0, 131) for _ in range(2))
    whole.run(_rows(0, [131], [0], [1], {}))
    low = 0
    for count in (64, 1, 1, 2, 63):
        pieces.run(_rows(low, [count], [low], [1], {}))
        low += count
    assert torch.equal(whole.qkv[:131], pieces.qkv[:131])
    assert torch.equal(whole.g[:131], pieces.g[:131])
    assert torch.equal(whole.beta[:131], pieces.beta[:131])
    assert torch.equal(whole.windows[1], pieces.windows[1])


def test_no_tiles_is_no_launch() -> None:
    layer = Layer(HEADS[0], 4, torch.float32, 0, 1)
    rows = _rows(0, [], [], [], {})
    layer.run(rows)
    layer.run(rows._replace(tiles=0))
    assert layer.windows.isnan().all()
    assert layer.qkv.isnan().all()


def test_gates_in_another_dtype_are_refused() -> None:
    layer = Layer(HEADS[0], 4, torch.bfloat16, 0, 1)
    layer.g = layer.g.bfloat16()
    with pytest.raises(TypeError, match="fp32"):
        layer.run(_rows(0, [1], [0], [1], {}))
