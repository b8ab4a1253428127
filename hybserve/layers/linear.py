"""Linear maps over packed tokens. Widths are this rank's own; several projections of one input are one map."""

import torch
import torch.nn.functional as F
from hybserve_kernels.linear import linear_add_, norm_linear

from hybserve.layers.norm import RMSNorm
from hybserve.layers.params import Params
from hybserve.parallel.mesh import Mesh
from hybserve.plan.costs import WIDE_BLOCK


class Linear:
    """x · weight^T (+ bias). ``outputs`` are columns that this rank holds: no communication."""

    def __init__(self, params: Params, name: str, inputs: int, outputs: int, bias: bool = False) -> None:
        self._params, self._name = params, name
        params.declare(f"{name}.weight", outputs, inputs)
        if bias:
            params.declare(f"{name}.bias", outputs)

    def bind(self) -> None:
        self.weight = bind_matrix(self._params, f"{self._name}.weight")
        self._bias = self._params.get(f"{self._name}.bias")

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return product(x_TD, self.weight, self._bias)

    def of_norm(self, hidden_TD: torch.Tensor, norm: RMSNorm, outputs: slice = slice(None)) -> torch.Tensor:
        """The product with the norm of the residual stream, or some outputs of it (Triton form)."""
        bias = None if self._bias is None else self._bias[outputs]
        return norm_linear(hidden_TD, norm.scale, norm.eps, self.weight[outputs], bias)


class ReducedLinear(Linear):
    """A linear whose ``inputs`` are split over the ranks; the partial results are summed, the bias added once."""

    def __init__(self, params: Params, name: str, inputs: int, outputs: int, mesh: Mesh, bias: bool = False) -> None:
        super().__init__(params, name, inputs, outputs, bias)
        self._mesh = mesh

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        bias = self._bias if self._mesh.share.rank == 0 else None
        return self._mesh.sum(product(x_TD, self.weight, bias))

    def add_to(self, hidden_TD: torch.Tensor, x_TD: torch.Tensor) -> None:
        """Add the product to the residual stream, in place (Triton form)."""
        self._mesh.require_single()
        linear_add_(hidden_TD, x_TD, self.weight, self._bias)


#: From so many rows on a 16-bit product on CPU is computed in fp32, block by block of its weights.
_WIDE_ROWS = 4


def product(x_TD: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weight^T (+ bias), accumulated in fp32.

    Few processors multiply 16-bit matrices well; there widening a block of weights costs less than the slow product
    from a few rows on (six times faster at 256 rows where it was measured), and rounds only the result.
    """
    rows, inputs = x_TD.shape
    if not weight.is_cpu or weight.dtype == torch.float32 or rows < _WIDE_ROWS:
        return F.linear(x_TD, weight, bias)
    wide_TD = x_TD.float()
    out = torch.empty(rows, weight.shape[0], dtype=x_TD.dtype)
    step = max(1, WIDE_BLOCK // inputs)
    for low in range(0, weight.shape[0], step):
        block = slice(low, low + step)
        out[:, block] = F.linear(wide_TD, weight[block].float(), None if bias is None else bias[block].float())
    return out


def bind_matrix(params: Params, name: str) -> torch.Tensor:
    """The weight [outputs, inputs] in the order of memory in which products with few tokens are fastest.

    On CPU in fp32 a matrix with more outputs than inputs moves, for good, to memory where a column is one run: at one
    token the product takes half the time, at more it is never slower. (In 16 bits that order has no fast product, and
    with more inputs than outputs it is the slower one.) While it moves, one weight lies in memory twice."""
    weight = params[name]
    outputs, inputs = weight.shape
    fp32_on_cpu = weight.is_cpu and weight.dtype == torch.float32 and not params.triton
    if fp32_on_cpu and outputs > inputs and weight.is_contiguous():
        weight = params.tensors[name] = weight.T.contiguous().T
    return weight
