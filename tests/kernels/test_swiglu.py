import pytest
import torch
from hybserve_kernels.swiglu import reference, swiglu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(1, 2), (7, 10), (65, 104), (3, 2, 6)])
def test_swiglu_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(shape).to(dtype)
    torch.testing.assert_close(swiglu(gate_up.clone()), reference.swiglu(gate_up), rtol=tolerance, atol=tolerance)
