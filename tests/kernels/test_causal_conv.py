"""C channels, W conv width."""

import pytest
import torch
from hybserve_kernels.causal_conv import causal_conv, conv_taps, conv_update, reference

CHANNELS = 37


def _windows(width: int, dtype: torch.dtype = torch.float32, slots: int = 5) -> torch.Tensor:
    """A view into a slot-major pool that holds NaN everywhere."""
    stride = CHANNELS * (width - 1) + 11
    pool = torch.full((slots * stride,), float("nan"), dtype=dtype)
    return pool.as_strided((slots, CHANNELS, width - 1), (stride, width - 1, 1))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 63, 65])
@pytest.mark.usefixtures("poisoned_empty")
def test_a_fresh_row_ignores_its_slot(tokens: int, width: int) -> None:
    torch.manual_seed(0)
    x, weight, windows = torch.randn(tokens, CHANNELS), torch.randn(CHANNELS, width), _windows(width)
    want, after = reference.causal_conv(x, torch.zeros(CHANNELS, width - 1), weight)
    torch.testing.assert_close(causal_conv(x, windows, 2, conv_taps(weight), True), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(windows[2], after)
    assert bool(windows[[0, 1, 3, 4]].isnan().all())


@pytest.mark.parametrize("width", [1, 3, 4])
def test_pieces_and_single_tokens_through_a_slot_are_the_whole(width: int) -> None:
    torch.manual_seed(0)
    x, weight, windows = torch.randn(40, CHANNELS), torch.randn(CHANNELS, width), _windows(width)
    want, after = reference.causal_conv(x, torch.zeros(CHANNELS, width - 1), weight)
    parts = [causal_conv(x[a:b], windows, 3, conv_taps(weight), a == 0) for a, b in ((0, 1), (1, 3), (3, 20), (20, 21))]
    parts += [conv_update(x[t : t + 1], windows, torch.tensor([3]), conv_taps(weight)) for t in range(21, 40)]
    torch.testing.assert_close(torch.cat(parts), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(windows[3], after)


@pytest.mark.parametrize("slots", [[1], [2, 3, 4], [4, 1, 3]])
def test_one_token_of_many_rows(slots: list[int]) -> None:
    torch.manual_seed(0)
    windows, weight = _windows(4), torch.randn(CHANNELS, 4)
    windows[slots] = torch.randn(len(slots), CHANNELS, 3)
    x = torch.randn(len(slots), 2 * CHANNELS)[:, :CHANNELS]
    want = [reference.causal_conv(x[n : n + 1], windows[slot], weight) for n, slot in enumerate(slots)]
    got = conv_update(x, windows, torch.tensor(slots), conv_taps(weight))
    torch.testing.assert_close(got, torch.cat([out for out, _ in want]), rtol=1e-5, atol=1e-5)
    for slot, (_, after) in zip(slots, want, strict=True):
        assert torch.equal(windows[slot], after)
    assert bool(windows[0].isnan().all())


def test_bf16_sums_in_fp32() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(30, CHANNELS).bfloat16(), torch.randn(CHANNELS, 4).bfloat16()
    windows = _windows(4, torch.bfloat16)
    want, after = reference.causal_conv(x, torch.zeros(CHANNELS, 3), weight)
    torch.testing.assert_close(causal_conv(x, windows, 1, conv_taps(weight), True), want)
    assert torch.equal(windows[1].float(), after)
    step, later = reference.causal_conv(x[:1], windows[1], weight)
    torch.testing.assert_close(conv_update(x[:1], windows, torch.tensor([1]), conv_taps(weight)), step)
    assert torch.equal(windows[1], later)
