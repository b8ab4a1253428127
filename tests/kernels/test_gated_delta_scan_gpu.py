"""I key heads, U value heads, K key dim, V value dim, S slots. Slot 0 is a canary; slots that no row owns and outputs
are NaN before the kernel runs."""

import pytest
import torch
from hybserve_kernels.gated_delta import reference, scan_rows
from hybserve_kernels.gated_delta.gpu.scan import Shape
from hybserve_kernels.rms_norm import reference as rms_norm
from hybserve_kernels.rows import TILE, PrefillRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = [(2, 4, 16, 32), (1, 3, 32, 16), (2, 2, 24, 40), (1, 1, 64, 64)]
COUNTS, STARTS = [200, 1, 64, 63, 65], [0, 64, 128, 0, 64]
SLOTS = [5, 3, 1, 8, 2]
NAN, EPS = float("nan"), 1e-6


def _ints(values: list[int], size: int, rest: int) -> torch.Tensor:
    return torch.tensor(values + [rest] * (size - len(values)), dtype=torch.int32, device=DEVICE)


def _rows(
    counts: list[int], starts: list[int], slots: list[int], exports: dict[tuple[int, int], int], spare: int = 2
) -> PrefillRows:
    """``exports``: (row, tile of the row) -> slot. ``spare`` rows and tiles stay unused."""
    tiles = [(row, offset) for row, count in enumerate(counts) for offset in range(0, count, TILE)]
    rows, room = len(counts) + spare, len(tiles) + spare
    first = [[row for row, _ in tiles].index(row) for row in range(len(counts))]
    return PrefillRows(
        rows,
        room,
        _ints([sum(counts[:row]) for row in range(len(counts))], rows, 1 << 30),
        _ints(counts, rows, 0),
        _ints(starts, rows, 1 << 30),
        _ints(slots, rows, 1 << 30),
        torch.full((rows, 1), 1 << 30, dtype=torch.int32, device=DEVICE),
        _ints(first, rows, 1 << 30),
        _ints([row for row, _ in tiles], room, -1),
        _ints([offset for _, offset in tiles], room, 1 << 30),
        _ints([exports.get((row, offset // TILE), 0) for row, offset in tiles], room, 0),
    )


class Inputs:
    """Of ``tokens`` tokens, and pools in which the given slots are filled."""

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        tokens: int,
        dtype: torch.dtype,
        filled: list[int],
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        key_heads, value_heads, key_dim, value_dim = self.heads = heads
        qk = torch.randn(2, tokens, key_heads, key_dim, device=DEVICE)
        qk[1] += 1.0  # keys that resemble one another make a system far from 1
        self.q, self.k = (part.to(dtype) for part in reference.unit_queries_keys(qk[0], qk[1]))
        self.v = torch.randn(tokens, value_heads, value_dim, device=DEVICE).to(dtype)
        self.qkv = torch.cat([part.flatten(1) for part in (self.q, self.k, self.v)], dim=1)
        self.g = -(torch.rand(tokens, value_heads, device=DEVICE) ** 4)
        self.beta = torch.rand(tokens, value_heads, device=DEVICE)
        self.z = torch.randn(tokens, value_heads * value_dim + 8, device=DEVICE).to(dtype)
        self.z_view = self.z[:, : value_heads * value_dim].unflatten(1, (value_heads, value_dim))
        self.weight = torch.rand(value_dim, device=DEVICE).to(dtype) + 0.5
        self.matrices = torch.full((10, 2, value_heads, key_dim, value_dim), NAN, dtype=state_dtype, device=DEVICE)
        self.matrices = self.matrices[:, 1]
        for slot in filled:
            self.matrices[slot] = torch.randn(self.matrices.shape[1:], device=DEVICE).to(state_dtype)

    def run(self, rows: PrefillRows, shape: Shape | None = None) -> torch.Tensor:
        out = torch.full((self.qkv.shape[0], self.heads[1] * self.heads[3]), NAN, dtype=self.qkv.dtype, device=DEVICE)
        gates = (self.g, self.beta)
        scan_rows(self.qkv, *gates, self.matrices, rows, self.heads, self.z_view, self.weight, EPS, out, shape)
        return out

    def expected(self, begin: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = slice(begin, end)
        o, state = reference.recurrent(self.q[own], self.k[own], self.v[own], self.g[own], self.beta[own], state)
        return rms_norm.rms_norm_gated(o, self.z_view[own], self.weight, EPS).flatten(1), state


def _close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Products of bf16 have few digits, and the norm of a small vector loses more: then most elements count (the
    interpreter cuts digits off, too)."""
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    else:
        torch.testing.assert_close(got.float(), want.float(), rtol=0.1, atol=0.2)
        assert (got.float() - want.float()).norm() < 0.03 * want.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_rows_are_the_reference(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    filled = [slot for slot, start in zip(SLOTS, STARTS, strict=True) if start]
    exports = {(0, 0): 4, (0, 2): 6, (4, 0): 7}
    inputs = Inputs(heads, sum(COUNTS) + 3, dtype, filled)
    before = inputs.matrices.clone()
    shape = Shape(16, 4, 2, True, 1) if heads[3] == 64 else None  # slices, pieces and a kernel of its own for the norm
    out = inputs.run(_rows(COUNTS, STARTS, SLOTS, exports), shape)
    after = inputs.matrices.float()
    begin = 0
    for row, (count, start, slot) in enumerate(zip(COUNTS, STARTS, SLOTS, strict=True)):
        state = before[slot] if start else torch.zeros_like(before[slot])
        want, end_state = inputs.expected(begin, begin + count, state)
        _close(out[begin : begin + count], want, dtype)
        _close(after[slot], end_state, dtype)
        for (owner, tile), target in exports.items():
            if owner == row:
                _, at = inputs.expected(begin, begin + min(count, (tile + 1) * TILE), state)
                _close(after[target], at, dtype)
        begin += count
    assert out[begin:].isnan().all()
    assert after[[0, 9]].isnan().all()


def test_equal_keys_without_decay() -> None:
    """The system is as far from 1 as it gets: every product of keys is 1, every strength close to 1."""
    inputs = Inputs((1, 1, 16, 16), 130, torch.float32, [])
    inputs.k[:] = inputs.k[:1].clone()
    inputs.qkv[:, 16:32] = inputs.k.flatten(1)
    inputs.g.zero_()
    inputs.beta.fill_(0.999)
    out = inputs.run(_rows([130], [0], [2], {}))
    want, state = inputs.expected(0, 130, torch.zeros_like(inputs.matrices[2]))
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(inputs.matrices[2], state, rtol=1e-3, atol=1e-4)


def test_states_in_bf16_round_by_position() -> None:
    """Up or down to a neighbour of what fp32 holds, unbiased; the same as an export and at an end."""
    heads, tokens = (1, 2, 32, 32), 128
    wide = Inputs(heads, tokens, torch.float32, [])
    wide.run(_rows([tokens], [0], [3], {(0, 0): 4}))
    narrow = Inputs(heads, tokens, torch.float32, [], torch.bfloat16)
    narrow.run(_rows([tokens], [0], [3], {(0, 0): 4, (0, 1): 5}))
    piece = Inputs(heads, tokens, torch.float32, [], torch.bfloat16)
    piece.run(_rows([64], [0], [6], {}))
    assert torch.equal(narrow.matrices[3], narrow.matrices[5])
    assert torch.equal(piece.matrices[6], narrow.matrices[4])
    for slot in (3, 4):
        exact, rounded = wide.matrices[slot], narrow.matrices[slot].float()
        error = (rounded - exact) / exact.abs()
        assert error.abs().max() < 2**-7
        assert error.mean().abs() < 2**-12
    assert not torch.equal(wide.matrices[3].bfloat16(), narrow.matrices[3])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are of a card")
def test_captured_graph_follows_the_rows() -> None:
    heads = (16, 32, 128, 128)
    inputs = Inputs(heads, 400, torch.bfloat16, [])
    rows = _rows([100, 300], [0, 0], [1, 2], {}, spare=0)
    inputs.run(rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = inputs.run(rows)
    for target, source in zip(rows[2:], _rows([180, 220], [0, 0], [3, 4], {}, spare=0)[2:], strict=True):
        if target.shape == source.shape:
            target.copy_(source)
    graph.replay()
    want = inputs.run(_rows([180, 220], [0, 0], [5, 6], {}, spare=0))
    assert torch.equal(out, want)
    assert torch.equal(inputs.matrices[3], inputs.matrices[5])
