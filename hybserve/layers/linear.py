"""Linear maps over packed tokens. Widths are this rank's own; several projections of one input are one map."""

import torch
import torch.nn.functional as F

from hybserve.layers.params import Params
from hybserve.parallel.mesh import Mesh


class Linear:
    """x · weight^T (+ bias). ``outputs`` are columns that this rank holds: no communication."""

    def __init__(self, params: Params, name: str, inputs: int, outputs: int, bias: bool = False) -> None:
        self._params, self._name = params, name
        params.declare(f"{name}.weight", outputs, inputs)
        if bias:
            params.declare(f"{name}.bias", outputs)

    def bind(self) -> None:
        self._weight = bind_matrix(self._params, f"{self._name}.weight")
        self._bias = self._params.get(f"{self._name}.bias")

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self._weight, self._bias)


class ReducedLinear(Linear):
    """A linear whose ``inputs`` are split over the ranks; the partial results are summed, the bias added once."""

    def __init__(self, params: Params, name: str, inputs: int, outputs: int, mesh: Mesh, bias: bool = False) -> None:
        super().__init__(params, name, inputs, outputs, bias)
        self._mesh = mesh

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        bias = self._bias if self._mesh.share.rank == 0 else None
        return self._mesh.sum(F.linear(x_TD, self._weight, bias))


def bind_matrix(params: Params, name: str) -> torch.Tensor:
    """The weight [outputs, inputs] in the order of memory in which products with few tokens are fastest.

    On CPU in fp32 a matrix with more outputs than inputs moves, for good, to memory where a column is one run: at one
    token the product takes half the time, at more it is never slower. (In 16 bits that order has no fast product, and
    with more inputs than outputs it is the slower one.) While it moves, one weight lies in memory twice."""
    weight = params[name]
    outputs, inputs = weight.shape
    if weight.is_cpu and weight.dtype == torch.float32 and outputs > inputs and weight.is_contiguous():
        weight = params.tensors[name] = weight.T.contiguous().T
    return weight
