import pytest
import torch
from hybserve_kernels.rms_norm import gpu, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]


def strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random; rows lie further apart than they are long."""
    wide = torch.randn(shape[0], *shape[1:-1], shape[-1] + 16, device=DEVICE).to(dtype)
    return wide[..., 8:-8]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 5), (65, 44), (3, 1000), (2, 4096)])
def test_norm_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, scale = strided(*shape, dtype=dtype), 1 + 0.3 * torch.randn(shape[-1], device=DEVICE)
    got = gpu.rms_norm(x, scale, 1e-6)
    torch.testing.assert_close(got, reference.rms_norm(x, scale, 1e-6), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (63, 44), (3, 1000)])
def test_the_sum_is_rounded_as_torch_does_and_normed_after(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(1)
    hidden, delta = strided(*shape, dtype=dtype), strided(*shape, dtype=dtype)
    around, scale = hidden._base.clone(), torch.randn(shape[-1], device=DEVICE)
    total = hidden + delta
    got = gpu.rms_norm(hidden, scale, 1e-6, delta_TD=delta)
    torch.testing.assert_close(got, reference.rms_norm(total, scale, 1e-6), rtol=tolerance, atol=tolerance)
    if DEVICE == "cpu" and dtype == torch.bfloat16:  # which the interpreter truncates
        total = torch.where((hidden - total).abs() <= tolerance * total.abs(), hidden, total)
    around[..., 8:-8] = total
    assert torch.equal(hidden._base, around)


@pytest.mark.parametrize("per_head", [True, False])
def test_heads_of_a_wider_row_and_a_wider_result(per_head: bool) -> None:
    torch.manual_seed(2)
    wide = torch.randn(9, 3 * 20 + 8, device=DEVICE).bfloat16()
    x, scale = wide[:, 4:-4].unflatten(1, (3, 20)), torch.randn(3, 20, device=DEVICE)
    if not per_head:
        scale = scale[0].contiguous()
    got = gpu.rms_norm(x, scale, 1e-5, torch.float32)
    torch.testing.assert_close(got, reference.rms_norm(x.float(), scale, 1e-5))


def test_rows_stay_apart() -> None:
    x = torch.zeros(5, 8, device=DEVICE)
    x[1] = float("nan")
    got = gpu.rms_norm(x, torch.ones(8, device=DEVICE), 1e-6)
    assert bool((got[[0, 2, 3, 4]] == 0).all())
