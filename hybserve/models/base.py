"""What every model family offers to the runner and to the loader.

Legend: T packed tokens, N rows, D model dim, C vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybserve.layers.params import Params
from hybserve.layers.step_context import StepContext
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import RankShare


class Model(ABC):
    """One rank's part of a model. Fill ``params`` first (in place, or by replacing entries), then compute; after a
    later change of a parameter call ``bind`` again. ``bind`` may replace an entry by the same values in another order
    of memory: take entries anew after it. Callers hold ``torch.inference_mode``."""

    def __init__(
        self, spec: ModelSpec, share: RankShare, dtype: torch.dtype, device: torch.device, triton: bool
    ) -> None:
        self.spec = spec
        self.share = share
        self.dtype = dtype
        self._params = Params(dtype, device, triton)
        self._bound = False

    @property
    def triton(self) -> bool:
        """Whether it computes through the Triton forms: on the tensors of ``StepContext.step``."""
        return self._params.triton

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Every parameter of this rank by name, in local shapes."""
        return self._params.tensors

    def bind(self) -> None:
        """Take the parameters as they are now and derive from them what the forward reads."""
        self._bind_layers()
        self._bound = True

    def forward(
        self, tokens_T: torch.Tensor, context: StepContext, hidden_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [T, D] of a step; of the last stage after the final norm, and only of the tokens
        ``step.last`` [N, D] where the context has it. Reads and writes the pools of the context. A stage that is not
        the first takes the hidden states of the one before it."""
        assert self.share.first == (hidden_TD is None), "hidden states come from the stage before, and only from there"
        if not self._bound:
            self.bind()
        if context.deterministic:
            with _one_thread():
                return self._forward(tokens_T, context, hidden_TD)
        return self._forward(tokens_T, context, hidden_TD)

    def logits(self, hidden_ND: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
        """Logits [N, C] in fp32 of rows of the last stage's hidden states. ``deterministic``: the rows are a whole
        tile, and each one's bits depend on nothing but itself and its place in the tile."""
        if deterministic:
            with _one_thread():
                return self._logits(hidden_ND)
        return self._logits(hidden_ND)

    def rehearse(self, tokens_T: torch.Tensor, context: StepContext) -> None:
        """Go through the Triton forms of one layer of each kind, to compile what such a step needs."""
        if not self._bound:
            self.bind()
        self._rehearse(tokens_T, context)

    @abstractmethod
    def _rehearse(self, tokens_T: torch.Tensor, context: StepContext) -> None: ...

    def logits_rows(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """The same in the model's dtype, through the Triton forms."""
        return self._logits_rows(hidden_ND)

    @abstractmethod
    def _logits_rows(self, hidden_ND: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _bind_layers(self) -> None: ...

    @abstractmethod
    def _forward(
        self, tokens_T: torch.Tensor, context: StepContext, hidden_TD: torch.Tensor | None
    ) -> torch.Tensor: ...


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrix products choose other kernels for other shares of their rows: with one thread the bits of a tile do not
    depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
