import pytest
import torch
from hybserve_kernels.swiglu import gpu, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1, 2), (7, 10), (65, 104), (3, 2, 6), (2, 2600)])
def test_swiglu_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    torch.testing.assert_close(gpu.swiglu(gate_up), reference.swiglu(gate_up), rtol=tolerance, atol=tolerance)


def test_rows_may_be_strided() -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(5, 30, device=DEVICE)[:, 6:26]
    torch.testing.assert_close(gpu.swiglu(gate_up), reference.swiglu(gate_up))
