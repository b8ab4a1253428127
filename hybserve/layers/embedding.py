"""Token embedding and the logits over the vocabulary.

Legend: T tokens, N rows, D model dim, C vocabulary.
"""

import torch
import torch.nn.functional as F
from hybserve_kernels.linear import linear

from hybserve.layers.linear import bind_matrix, product
from hybserve.layers.params import Params
from hybserve.layers.step_context import StepContext
from hybserve.parallel.mesh import Mesh
from hybserve.spec.split import width


class Embedding:
    """Rows of the vocabulary that this rank holds."""

    def __init__(self, params: Params, name: str, hidden: int, mesh: Mesh) -> None:
        self._params, self._name, self._mesh = params, name, mesh
        params.declare(f"{name}.weight", width(mesh.share.vocab), hidden)

    def bind(self) -> None:
        self._weight = self._params[f"{self._name}.weight"]

    def __call__(self, tokens_T: torch.Tensor, context: StepContext) -> torch.Tensor:
        """[T, D]; the rows outside a deterministic tile are zero."""
        self._mesh.require_single()
        hidden_TD = F.embedding(tokens_T, self._weight)
        if context.deterministic:
            low, high = context.tile
            hidden_TD[:low] = 0.0
            hidden_TD[high:] = 0.0
        return hidden_TD


class VocabularyHead:
    """Logits in fp32 from the weight of that name; ``shared`` with the embedding, which reads rows of it."""

    def __init__(self, params: Params, name: str, mesh: Mesh, shared: bool) -> None:
        self._params, self._name, self._mesh, self._shared = params, name, mesh, shared

    def bind(self) -> None:
        name = f"{self._name}.weight"
        self._weight = self._params[name] if self._shared else bind_matrix(self._params, name)

    def __call__(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        self._mesh.require_single()
        return product(hidden_ND, self._weight).float()

    def of(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits in the model's dtype (Triton form)."""
        self._mesh.require_single()
        return linear(hidden_ND, self._weight)
