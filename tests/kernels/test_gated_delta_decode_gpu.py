"""I key heads, U value heads, K key dim, V value dim, W conv width, S slots. Slot 0 is a canary; slots that no row owns
and outputs are NaN before the kernel runs."""

import pytest
import torch
from hybserve_kernels import causal_conv
from hybserve_kernels.causal_conv import reference as convolution
from hybserve_kernels.gated_delta import decode_rows, reference
from hybserve_kernels.gated_delta.gpu.decode import Shape
from hybserve_kernels.rms_norm import reference as rms_norm
from hybserve_kernels.rows import DecodeRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = [(2, 4, 16, 32), (1, 3, 32, 16), (2, 2, 24, 40), (1, 4, 64, 64)]
WIDTHS = [4, 2, 3, 4]
#: Of the norm of what is compared; the interpreter cuts off where bf16 should be rounded.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2 if DEVICE == "cuda" else 1e-1}
#: Heads in slices and whole.
SHAPES = [Shape(16, 2), Shape(64, 4), Shape(16, 1), Shape(32, 4)]
NAN, EPS = float("nan"), 1e-6


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Layer:
    """Weights, and pools in which the given slots are filled."""

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        width: int,
        dtype: torch.dtype,
        slots: list[int],
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        key_heads, value_heads, key_dim, value_dim = self.heads = heads
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.columns = self.channels + value_heads * (value_dim + 2)
        self.dtype = dtype
        self.weight = torch.randn(self.channels, width, device=DEVICE).to(dtype)
        self.a_log, self.dt_bias = torch.randn(2, value_heads, device=DEVICE)
        self.norm_weight = torch.randn(value_dim, device=DEVICE).to(dtype)
        shape = (max(slots) + 2, 2)
        self.windows = torch.full((*shape, self.channels, width - 1), NAN, dtype=dtype, device=DEVICE)[:, 1]
        self.matrices = torch.full((*shape, value_heads, key_dim, value_dim), NAN, dtype=state_dtype, device=DEVICE)[
            :, 1
        ]
        for slot in slots:
            self.windows[slot] = torch.randn(self.windows.shape[1:], device=DEVICE).to(dtype)
            self.matrices[slot] = torch.randn(self.matrices.shape[1:], device=DEVICE).to(state_dtype)

    def tokens(self, count: int) -> torch.Tensor:
        wide = torch.full((count, self.columns + 5), NAN, dtype=self.dtype, device=DEVICE)
        wide[:, : self.columns] = torch.randn(count, self.columns, device=DEVICE).to(self.dtype)
        return wide[:, : self.columns]

    def run(
        self, projected: torch.Tensor, lengths: list[int], slots: list[int], shape: Shape | None = None
    ) -> torch.Tensor:
        out = torch.full((projected.shape[0], self.heads[1] * self.heads[3]), NAN, dtype=self.dtype, device=DEVICE)
        tables = torch.full((len(lengths), 1), 1 << 30, dtype=torch.int32, device=DEVICE)
        rows = DecodeRows(len(lengths), _ints(lengths), _ints(slots), tables)
        taps, rate = causal_conv.conv_taps(self.weight), -self.a_log.exp()
        decode_rows(
            projected,
            self.windows,
            self.matrices,
            taps,
            rate,
            self.dt_bias,
            self.norm_weight,
            EPS,
            self.heads,
            rows,
            out,
            shape,
        )
        return out

    def expected(
        self, x: torch.Tensor, window: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of one token [1, .] the output, and window and matrices after it."""
        key_heads, value_heads, key_dim, value_dim = self.heads
        y, window = convolution.causal_conv(x[:, : self.channels], window, self.weight)
        q, k, v = y.split_with_sizes([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=1)
        q, k = reference.unit_queries_keys(q.view(1, key_heads, -1), k.view(1, key_heads, -1))
        z, b, a = x[:, self.channels :].split_with_sizes([value_heads * value_dim, value_heads, value_heads], dim=1)
        g, beta = reference.decay_and_strength(a, b, self.a_log, self.dt_bias)
        o, state = reference.recurrent(q, k, v.view(1, value_heads, -1), g, beta, state)
        return rms_norm.rms_norm_gated(o, z.view(o.shape), self.norm_weight, EPS).flatten(), window, state


def _close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert (got.float() - want.float()).norm() <= CLOSE[dtype] * want.float().norm()


@pytest.mark.parametrize(
    ("heads", "width", "shape", "dtype"),
    [
        *((*of, torch.float32) for of in zip(HEADS, WIDTHS, SHAPES, strict=True)),
        *((*of, torch.bfloat16) for of in zip(HEADS, WIDTHS, SHAPES[::-1], strict=True)),
    ],
)
def test_rows_are_the_reference(heads: tuple[int, int, int, int], width: int, dtype: torch.dtype, shape: Shape) -> None:
    lengths, slots = [7, 0, 64, 1, 300, 0], [5, 3, 1, 8, 2, 0]
    filled = [slot for slot, length in zip(slots, lengths, strict=True) if length]
    layer = Layer(heads, width, dtype, filled)
    projected = layer.tokens(9)
    windows, matrices = layer.windows.clone(), layer.matrices.clone()
    out = layer.run(projected, lengths, slots, shape)
    for n, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        if length:
            want, window, state = layer.expected(projected[n : n + 1], windows[slot], matrices[slot])
            _close(out[n], want, dtype)
            assert torch.equal(layer.windows[slot], window)
            _close(layer.matrices[slot], state, dtype)
        else:
            assert out[n].isnan().all()
    assert out[len(lengths) :].isnan().all()
    untouched = [slot for slot in range(layer.windows.shape[0]) if slot not in filled]
    assert layer.windows[untouched].isnan().all()
    assert layer.matrices[untouched].isnan().all()


def test_many_steps_stay_with_the_reference() -> None:
    layer = Layer(HEADS[0], 4, torch.float32, [2, 1])
    states = {slot: (layer.windows[slot].clone(), layer.matrices[slot].clone()) for slot in (2, 1)}
    for step in range(6):
        projected = layer.tokens(2)
        out = layer.run(projected, [step + 1, step + 9], [2, 1])
        for n, slot in enumerate((2, 1)):
            want, *states[slot] = layer.expected(projected[n : n + 1], *states[slot])
            _close(out[n], want, torch.float32)
            _close(layer.matrices[slot], states[slot][1], torch.float32)


def test_bf16_states_are_rounded_to_a_neighbour_without_bias() -> None:
    exact, rounded = (Layer(HEADS[3], 4, torch.float32, [1, 2], dtype) for dtype in (torch.float32, torch.bfloat16))
    rounded.windows[2], rounded.matrices[2] = rounded.windows[1], rounded.matrices[1]
    exact.windows.copy_(rounded.windows)
    exact.matrices.copy_(rounded.matrices)
    projected = exact.tokens(1).expand(2, -1)
    exact.run(projected, [5, 6], [1, 2])
    outs = rounded.run(projected, [5, 6], [1, 2])
    assert torch.equal(outs[0], outs[1])
    want, got = exact.matrices[1], rounded.matrices[1].float()
    step = torch.exp2(want.abs().log2().floor() - 7)  # between neighbours in bf16
    moved = (got - want) / step
    assert (moved.abs() < 1.0001).all()
    assert (moved.abs() > 0.5).float().mean() > 0.2  # some went to the farther neighbour
    assert moved.mean().abs() < 5 * 0.4 / want.numel() ** 0.5
    assert not torch.equal(rounded.matrices[1], rounded.matrices[2])


def test_equal_positions_round_alike() -> None:
    layer = Layer(HEADS[0], 4, torch.bfloat16, [1, 2], torch.bfloat16)
    layer.windows[2], layer.matrices[2] = layer.windows[1], layer.matrices[1]
    out = layer.run(layer.tokens(1).expand(2, -1), [9, 9], [2, 1])
    assert torch.equal(out[0], out[1])
    assert torch.equal(layer.matrices[1], layer.matrices[2])


def test_a_state_that_is_not_finite_stays_so() -> None:
    layer = Layer(HEADS[0], 4, torch.float32, [1], torch.bfloat16)
    layer.matrices[1, 0, 3, 4] = NAN
    layer.matrices[1, 1, 3, 4] = float("inf")
    out = layer.run(layer.tokens(1), [9], [1]).view(4, 32)
    assert layer.matrices[1, 0, 3, 4].isnan()
    assert not layer.matrices[1, 1, 3, 4].isfinite()
    assert not out[0].isfinite().any()
    assert out[2:].isfinite().all()


@pytest.mark.parametrize("shape", [Shape(16, 2), Shape(32, 4)], ids=str)
def test_windows_move_on_once_all_heads_of_a_key_head_have_read_them(shape: Shape) -> None:
    """Six value heads share one key head; the counters are zero again for the next step, with other rows too."""
    layer = Layer((1, 6, 16, 32), 4, torch.float32, [1, 2, 3])
    for lengths, slots in (([4, 0, 6], [1, 2, 3]), ([5, 1, 7], [1, 2, 3]), ([2, 8, 6], [2, 3, 1])):
        windows, matrices = layer.windows.clone(), layer.matrices.clone()
        projected = layer.tokens(3)
        out = layer.run(projected, lengths, slots, shape)
        for n, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            if length:
                want, window, state = layer.expected(projected[n : n + 1], windows[slot], matrices[slot])
                _close(out[n], want, torch.float32)
                assert torch.equal(layer.windows[slot], window)
                _close(layer.matrices[slot], state, torch.float32)
            else:
                assert torch.equal(layer.windows[slot], windows[slot])


def test_no_rows_is_no_launch() -> None:
    layer = Layer(HEADS[0], 4, torch.float32, [1])
    before = layer.matrices.clone()
    assert layer.run(layer.tokens(2), [], []).isnan().all()
    assert torch.equal(layer.matrices[1], before[1])


def test_other_dtypes_of_matrices_are_refused() -> None:
    layer = Layer(HEADS[0], 4, torch.float32, [1], torch.float16)
    with pytest.raises(TypeError, match="fp32 or bf16"):
        layer.run(layer.tokens(1), [1], [1])
