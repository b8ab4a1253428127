"""The Qwen hybrid family: Qwen3-Next, Qwen3.5 and Qwen3.5-MoE. What differs between them stands in the ModelSpec.

Each layer: x + mixer(norm(x)), then x + mlp(norm(x)), where the mixer is full attention or Gated DeltaNet and the mlp
is dense or a mixture of experts.

Legend: T packed tokens, N rows, D model dim, C vocabulary.
"""

import torch
from hybserve_kernels.rotary import RotaryTables

from hybserve.layers.attention import Attention
from hybserve.layers.embedding import Embedding, VocabularyHead
from hybserve.layers.gated_delta import GatedDelta
from hybserve.layers.mlp import Mlp
from hybserve.layers.moe import Moe
from hybserve.layers.norm import RMSNorm
from hybserve.layers.params import Params
from hybserve.layers.rotary import Rotary
from hybserve.layers.step_context import StepContext
from hybserve.models.base import Model
from hybserve.parallel.mesh import Mesh
from hybserve.spec.model_spec import LayerSpec, ModelSpec
from hybserve.spec.split import RankShare, width


class DecoderLayer:
    """``pool`` is the index of the layer among those of its mixer on this rank."""

    def __init__(self, params: Params, name: str, spec: ModelSpec, layer: LayerSpec, mesh: Mesh, pool: int) -> None:
        self._input_norm = RMSNorm(params, f"{name}.input_norm", spec.hidden, spec.norm_eps)
        self._attention: Attention | None = None
        self._delta: GatedDelta | None = None
        self._mlp: Mlp | None = None
        self._moe: Moe | None = None
        if layer.mixer == "attention":
            assert spec.attention is not None
            self._attention = Attention(
                params, f"{name}.attention", spec.hidden, spec.attention, spec.norm_eps, mesh, pool
            )
        else:
            assert spec.gated_delta is not None
            self._delta = GatedDelta(
                params, f"{name}.gated_delta", spec.hidden, spec.gated_delta, spec.norm_eps, mesh, pool
            )
        self._post_norm = RMSNorm(params, f"{name}.post_norm", spec.hidden, spec.norm_eps)
        if layer.mlp == "dense":
            self._mlp = Mlp(params, f"{name}.mlp", spec.hidden, width(mesh.share.ffn), mesh)
        else:
            assert spec.moe is not None
            self._moe = Moe(params, f"{name}.moe", spec.hidden, spec.moe, mesh)

    def bind(self) -> None:
        for part in (self._input_norm, self._attention, self._delta, self._post_norm, self._mlp, self._moe):
            if part is not None:
                part.bind()

    def __call__(self, hidden_TD: torch.Tensor, context: StepContext, tables: RotaryTables | None) -> torch.Tensor:
        """The new residual stream; the given one is overwritten."""
        normed = self._input_norm(hidden_TD)
        if self._delta is not None:
            hidden_TD += self._delta(normed, context)
        elif self._attention is not None and tables is not None:
            hidden_TD += self._attention(normed, context, tables)
        normed = self._post_norm(hidden_TD)
        if self._mlp is not None:
            hidden_TD += self._mlp(normed)
        elif self._moe is not None:
            hidden_TD += self._moe(normed, context)
        return hidden_TD

    def add_to(self, hidden_TD: torch.Tensor, context: StepContext, frequencies: torch.Tensor | None) -> None:
        """The same on the residual stream in place (Triton form)."""
        if self._delta is not None:
            self._delta.add_to(hidden_TD, self._input_norm, context)
        elif self._attention is not None and frequencies is not None:
            self._attention.add_to(hidden_TD, self._input_norm, context, frequencies)
        assert context.step is not None
        self._add_mlp_to(hidden_TD, context.step.tokens_1)

    def of_last(self, hidden_TD: torch.Tensor, context: StepContext, frequencies: torch.Tensor | None) -> torch.Tensor:
        """What ``add_to`` makes of the last token of every row, [N, D], and for the other tokens only what the pools
        get; ``hidden_TD`` is left in any state (Triton form)."""
        assert context.step is not None
        last = context.step.last
        assert last is not None
        if self._attention is not None and frequencies is not None:
            last_ND = hidden_TD.index_select(0, last.at_N)
            self._attention.add_to_last(last_ND, hidden_TD, self._input_norm, context, frequencies)
        else:
            if self._delta is not None:
                self._delta.add_to(hidden_TD, self._input_norm, context)
            last_ND = hidden_TD.index_select(0, last.at_N)
        self._add_mlp_to(last_ND, last.rows_1)
        return last_ND

    def _add_mlp_to(self, hidden_TD: torch.Tensor, real_1: torch.Tensor) -> None:
        if self._mlp is not None:
            self._mlp.add_to(hidden_TD, self._post_norm)
        elif self._moe is not None:
            self._moe.add_to(hidden_TD, self._post_norm, real_1)


class QwenHybrid(Model):
    def __init__(
        self, spec: ModelSpec, share: RankShare, dtype: torch.dtype, device: torch.device, triton: bool
    ) -> None:
        super().__init__(spec, share, dtype, device, triton)
        params, mesh = self._params, Mesh(share)
        self._embed: Embedding | None = None
        self._norm: RMSNorm | None = None
        self._head: VocabularyHead | None = None
        if share.first or (share.last and spec.tied):
            self._embed = Embedding(params, "embed", spec.hidden, mesh)
        self._layers = self._build_layers(params, mesh)
        self._rotary = Rotary(spec.attention, device) if self._attends() and spec.attention is not None else None
        if share.last:
            self._norm = RMSNorm(params, "norm", spec.hidden, spec.norm_eps)
            if not spec.tied:
                params.declare("lm_head.weight", width(share.vocab), spec.hidden)
            self._head = VocabularyHead(params, "embed" if spec.tied else "lm_head", mesh, spec.tied)

    def _build_layers(self, params: Params, mesh: Mesh) -> list[DecoderLayer]:
        layers: list[DecoderLayer] = []
        seen = {"attention": 0, "gated_delta": 0}
        for index, layer in enumerate(self.share.layer_specs(self.spec), start=self.share.layers[0]):
            layers.append(DecoderLayer(params, f"layers.{index}", self.spec, layer, mesh, seen[layer.mixer]))
            seen[layer.mixer] += 1
        return layers

    def _attends(self) -> bool:
        return any(layer.mixer == "attention" for layer in self.share.layer_specs(self.spec))

    def _bind_layers(self) -> None:
        for part in (self._embed, *self._layers, self._norm, self._head):
            if part is not None:
                part.bind()

    def _forward(self, tokens_T: torch.Tensor, context: StepContext, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        if hidden_TD is None:
            assert self._embed is not None
            hidden_TD = self._embed(tokens_T, context)
        if context.step is not None:
            return self._forward_rows(hidden_TD, context)
        tables = None if self._rotary is None else self._rotary(context)
        for layer in self._layers:
            hidden_TD = layer(hidden_TD, context, tables)
        return hidden_TD if self._norm is None else self._norm(hidden_TD)

    def _forward_rows(self, hidden_TD: torch.Tensor, context: StepContext) -> torch.Tensor:
        frequencies = None if self._rotary is None else self._rotary.frequencies
        short = self._ends_short(context)
        for layer in self._layers[:-1] if short else self._layers:
            layer.add_to(hidden_TD, context, frequencies)
        if short:
            hidden_TD = self._layers[-1].of_last(hidden_TD, context, frequencies)
        return hidden_TD if self._norm is None else self._norm(hidden_TD)

    def _ends_short(self, context: StepContext) -> bool:
        """Whether the last layer here is the model's, and only the last tokens of rows are read after it."""
        return self.share.last and context.step is not None and context.step.last is not None

    def _rehearse(self, tokens_T: torch.Tensor, context: StepContext) -> None:
        assert self._embed is not None
        hidden_TD = self._embed(tokens_T, context)
        frequencies = None if self._rotary is None else self._rotary.frequencies
        kinds = self.share.layer_specs(self.spec)
        for kind in dict.fromkeys(kinds):
            self._layers[kinds.index(kind)].add_to(hidden_TD, context, frequencies)
        if self._ends_short(context):
            hidden_TD = self._layers[-1].of_last(hidden_TD, context, frequencies)
        if self._norm is not None:
            self._norm(hidden_TD)

    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "only the last stage has logits"
        return self._head(hidden_ND)

    def _logits_rows(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "only the last stage has logits"
        return self._head.of(hidden_ND)
