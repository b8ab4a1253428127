import pytest
import torch

from hybserve.layers.linear import Linear
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
