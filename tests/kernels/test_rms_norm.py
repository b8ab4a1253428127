import pytest
import torch
from hybserve_kernels.rms_norm import reference, rms_norm, rms_norm_gated

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (7, 5), (65, 3, 20), (500, 44)])
def test_rms_norm_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(shape).to(dtype), 1 + 0.3 * torch.randn(shape[-1])
    torch.testing.assert_close(
        rms_norm(x, scale, 1e-6), reference.rms_norm(x, scale, 1e-6), rtol=tolerance, atol=tolerance
    )


def test_one_scale_per_head_and_a_wider_result() -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(6, 3, 20, dtype=torch.bfloat16), torch.randn(3, 20)
    got = rms_norm(x, scale, 1e-5, torch.float32)
    torch.testing.assert_close(got, reference.rms_norm(x.float(), scale, 1e-5))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_gated_is_the_reference_on_a_strided_gate(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, wide = torch.randn(9, 4, 12), torch.randn(9, 70).to(dtype)
    gate, weight = wide[:, 5:53].view(9, 4, 12), torch.randn(12).to(dtype)
    torch.testing.assert_close(
        rms_norm_gated(x, gate, weight, 1e-6),
        reference.rms_norm_gated(x, gate, weight, 1e-6),
        rtol=tolerance,
        atol=tolerance,
    )


def test_zero_rows_stay_zero_and_rows_stay_apart() -> None:
    x = torch.zeros(3, 8)
    x[1] = float("nan")
    got = rms_norm(x, torch.ones(8), 1e-6)
    assert bool((got[[0, 2]] == 0).all())
