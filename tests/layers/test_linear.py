import pytest
import torch

from hybserve.layers import linear as linear_module
from hybserve.layers.linear import Linear, product
from hybserve.layers.params import Params


@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs", "moves"),
    [(torch.float32, 24, 7, True), (torch.float32, 7, 24, False), (torch.bfloat16, 24, 7, False)],
)
def test_binding_keeps_values_and_moves_wide_fp32_weights_once(
    dtype: torch.dtype, outputs: int, inputs: int, moves: bool
) -> None:
    params = Params(dtype, torch.device("cpu"))
    linear = Linear(params, "some", inputs, outputs)
    values = torch.arange(outputs * inputs, dtype=dtype).view(outputs, inputs)
    params.tensors["some.weight"].copy_(values)
    linear.bind()
    placed = params["some.weight"]
    assert torch.equal(placed, values)
    assert placed.is_contiguous() is not moves
    linear.bind()
    assert params["some.weight"].data_ptr() == placed.data_ptr()
    assert torch.equal(linear(torch.eye(inputs, dtype=dtype)), values.T)


@pytest.mark.parametrize("rows", [1, 3, 4, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_16_bit_products_are_rounded_once_whatever_the_rows(
    rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "WIDE_BLOCK", 700)  # several blocks, the last one short
    torch.manual_seed(rows)
    x_TD, weight = torch.randn(rows, 96).bfloat16(), torch.randn(50, 96).bfloat16()
    added = torch.randn(50).bfloat16() if bias else None
    exact = x_TD.double() @ weight.double().T + (added.double() if bias else 0)
    got = product(x_TD, weight, added)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=2**-5)
