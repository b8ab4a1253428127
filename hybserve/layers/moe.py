"""Mixture of experts with an optional shared expert behind a sigmoid gate.

Legend: T tokens, D model dim, E experts, F this rank's part of an expert's width.
"""

import torch
from hybserve_kernels.linear import linear
from hybserve_kernels.moe import SharedExpert, experts, experts_whole, moe_rows, route

from hybserve.layers.linear import Linear
from hybserve.layers.mlp import Mlp
from hybserve.layers.norm import RMSNorm
from hybserve.layers.params import Params
from hybserve.layers.step_context import StepContext
from hybserve.parallel.mesh import Mesh
from hybserve.spec.model_spec import MoeSpec
from hybserve.spec.split import width

#: The joined matrix of the router and the gate has a multiple of so many rows: products of an odd number are slow.
_ROWS = 16


class Moe:
    def __init__(self, params: Params, name: str, hidden: int, spec: MoeSpec, mesh: Mesh) -> None:
        self._params, self._name, self._spec, self._mesh = params, name, spec, mesh
        ffn = width(mesh.share.expert_ffn)
        self._router = Linear(params, f"{name}.router", hidden, spec.experts)
        params.declare(f"{name}.gate_up.weight", spec.experts, 2 * ffn, hidden)
        params.declare(f"{name}.down.weight", spec.experts, hidden, ffn)
        self._shared: Mlp | None = None
        if spec.shared_ffn:
            self._shared = Mlp(params, f"{name}.shared", hidden, width(mesh.share.shared_ffn), mesh)
            self._shared_gate = Linear(params, f"{name}.shared_gate", hidden, 1)

    def bind(self) -> None:
        if self._params.triton:
            self._scoring = self._joined()
        self._router.bind()
        self._gate_up = self._params[f"{self._name}.gate_up.weight"]
        self._down = self._params[f"{self._name}.down.weight"]
        if self._shared is not None:
            self._shared.bind()
            self._shared_gate.bind()
            shared = (self._params[f"{self._name}.shared.{part}.weight"] for part in ("gate_up", "down"))
            self._shared_expert = SharedExpert(*shared)

    def _joined(self) -> torch.Tensor:
        """One matrix of the router's rows, the shared expert's gate and padding. The parameters become views of it."""
        names = [f"{self._name}.router.weight"]
        if self._shared is not None:
            names.append(f"{self._name}.shared_gate.weight")
        parts = [self._params[name] for name in names]
        rows = sum(len(part) for part in parts)
        joined = parts[0].new_zeros(-(-rows // _ROWS) * _ROWS, parts[0].shape[1])
        first = 0
        for name, part in zip(names, parts, strict=True):
            self._params.tensors[name] = joined[first : first + len(part)].copy_(part)
            first += len(part)
        return joined

    def __call__(self, x_TD: torch.Tensor, context: StepContext) -> torch.Tensor:
        weights, chosen = route(self._router(x_TD), self._spec.top_k, self._spec.norm_top_k)
        compute = experts_whole if context.deterministic else experts
        out_TD = self._mesh.sum(compute(x_TD, weights, chosen, self._gate_up, self._down))
        if self._shared is not None:
            out_TD += self._shared(x_TD) * torch.sigmoid(self._shared_gate(x_TD))
        return out_TD

    def add_to(self, hidden_TD: torch.Tensor, norm: RMSNorm, real_1: torch.Tensor) -> None:
        """Add the block's output for the norm of the residual stream to it, in place (Triton form). ``real_1``: how
        many rows are real, the first ones."""
        self._mesh.require_single()
        x_TD = norm(hidden_TD)
        count = self._spec.experts
        scores = linear(x_TD, self._scoring)
        moe_rows(
            x_TD,
            scores[:, :count],
            self._spec.top_k,
            self._spec.norm_top_k,
            self._gate_up,
            self._down,
            real_1,
            shared=None if self._shared is None else self._shared_expert,
            shared_gate_T1=None if self._shared is None else scores[:, count : count + 1],
            out=hidden_TD,
            add=True,
        )
