"""Full attention with q/k norms, partial rotary positions and an optional output gate, over the paged pool.

Legend: T packed tokens, H query heads, J kv heads, d head dim, D model dim; H and J are this rank's.
"""

import torch
from hybserve_kernels.attention import (
    attend_decode,
    attend_prefill,
    attend_tile,
    decode_rows,
    prefill_rows,
    prepare_rows,
    store_kv,
)
from hybserve_kernels.rotary import RotaryTables, rotary_

from hybserve.layers.beside import beside
from hybserve.layers.linear import Linear, ReducedLinear
from hybserve.layers.norm import HeadNorms, RMSNorm
from hybserve.layers.params import Params
from hybserve.layers.step_context import StepContext
from hybserve.parallel.mesh import Mesh
from hybserve.spec.model_spec import AttentionSpec
from hybserve.spec.split import width


class Attention:
    """``index`` counts the attention layers of this rank: which pool view it uses."""

    def __init__(
        self, params: Params, name: str, hidden: int, spec: AttentionSpec, eps: float, mesh: Mesh, index: int
    ) -> None:
        self._index = index
        self._q_heads, self._kv_heads, self._dim = width(mesh.share.q_heads), width(mesh.share.kv_heads), spec.head_dim
        self._gated, self._scale = spec.output_gate, spec.head_dim**-0.5
        self._query_width = self._q_heads * self._dim * (2 if spec.output_gate else 1)
        outputs = self._query_width + 2 * self._kv_heads * self._dim
        self._qkv = Linear(params, f"{name}.qkv", hidden, outputs, spec.bias)
        self._norms = HeadNorms(params, name, self._q_heads, self._kv_heads, self._dim, eps)
        self._o = ReducedLinear(params, f"{name}.o", self._q_heads * self._dim, hidden, mesh, spec.bias)

    def bind(self) -> None:
        self._qkv.bind()
        self._norms.bind()
        self._o.bind()

    def __call__(self, x_TD: torch.Tensor, context: StepContext, tables: RotaryTables) -> torch.Tensor:
        tokens = x_TD.shape[0]
        projected = self._qkv(x_TD)
        queries, keys, values = projected.split_with_sizes(
            (self._query_width, self._kv_heads * self._dim, self._kv_heads * self._dim), dim=1
        )
        q_and_gate = queries.view(tokens, self._q_heads, -1)
        k_TJd, v_TJd = (part.view(tokens, self._kv_heads, -1) for part in (keys, values))
        qk_THd = rotary_(self._norms(torch.cat((q_and_gate[..., : self._dim], k_TJd), dim=1)), tables).to(x_TD.dtype)
        q_THd, k_TJd = qk_THd.split_with_sizes((self._q_heads, self._kv_heads), dim=1)
        attended = self._attend(q_THd, k_TJd, v_TJd, context)
        if self._gated:
            attended = attended * torch.sigmoid(q_and_gate[..., self._dim :])
        return self._o(attended.reshape(tokens, -1))

    def add_to(self, hidden_TD: torch.Tensor, norm: RMSNorm, context: StepContext, frequencies: torch.Tensor) -> None:
        """Add the output for the norm of the residual stream to it, in place (Triton form)."""
        step, pool = context.step, context.kv_layers[self._index]
        assert step is not None
        projected_TX = self._qkv.of_norm(hidden_TD, norm)
        heads = (self._q_heads, self._kv_heads)
        q_THd = self._prepare(projected_TX, heads, frequencies, step.positions_T, step.locations_T, pool)
        gate_THd, out_TX = self._gates(projected_TX), self._room(hidden_TD)
        with beside(hidden_TD.device, step.mixed) as rejoin:
            if step.prefill is not None:
                prefill_rows(q_THd, pool, step.prefill, self._scale, gate_THd, out_TX)
        if step.decode is not None:
            decode_rows(q_THd, pool, step.decode, self._scale, gate_THd, out_TX)
        rejoin()
        self._o.add_to(hidden_TD, out_TX)

    def add_to_last(
        self,
        last_ND: torch.Tensor,
        hidden_TD: torch.Tensor,
        norm: RMSNorm,
        context: StepContext,
        frequencies: torch.Tensor,
    ) -> None:
        """The same where nothing but ``last_ND``, the residual stream of every row's last token, is read afterwards:
        keys and values of all tokens go to the pool, the output of those alone is computed and added (Triton form)."""
        step, pool = context.step, context.kv_layers[self._index]
        assert step is not None
        assert step.last is not None
        kv_TX = self._qkv.of_norm(hidden_TD, norm, slice(self._query_width, None))
        self._prepare(kv_TX, (0, self._kv_heads), frequencies, step.positions_T, step.locations_T, pool)
        query_NX = self._qkv.of_norm(last_ND, norm, slice(self._query_width))
        last = step.last
        q_NHd = self._prepare(query_NX, (self._q_heads, 0), frequencies, last.positions_N, last.positions_N, pool)
        out_NX = self._room(last_ND)
        decode_rows(q_NHd, pool, last.queries, self._scale, self._gates(query_NX), out_NX)
        self._o.add_to(last_ND, out_NX)

    def _prepare(
        self,
        projected_TX: torch.Tensor,
        heads: tuple[int, int],
        frequencies: torch.Tensor,
        positions_T: torch.Tensor,
        locations_T: torch.Tensor,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """Queries [T, H, d], normed and turned; keys and values go to the pool. ``heads``: of q and of kv in it."""
        norms = self._norms
        return prepare_rows(
            projected_TX,
            norms.q_scale_d,
            norms.k_scale_d,
            norms.eps,
            frequencies,
            positions_T,
            locations_T,
            pool,
            (*heads, self._dim),
            self._gated,
        )

    def _gates(self, projected_TX: torch.Tensor) -> torch.Tensor | None:
        if not self._gated:
            return None
        q_and_gate = projected_TX[:, : self._query_width].view(len(projected_TX), self._q_heads, -1)
        return q_and_gate[..., self._dim :]

    def _room(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return hidden_TD.new_empty(len(hidden_TD), self._q_heads * self._dim)

    def _attend(
        self, q_THd: torch.Tensor, k_TJd: torch.Tensor, v_TJd: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        pool = context.kv_layers[self._index]
        pages_T, offsets_T = context.places
        if context.deterministic:
            return self._attend_tile(q_THd, k_TJd, v_TJd, context)
        stored = context.stored_T
        if stored is None:
            store_kv(pool, k_TJd, v_TJd, pages_T, offsets_T)
        else:
            store_kv(pool, k_TJd[stored], v_TJd[stored], pages_T[stored], offsets_T[stored])
        decode, prefill = context.grouped
        if decode is not None and not prefill:
            return attend_decode(q_THd, pool, context.decode_pages, self._scale)
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        if decode is not None:
            out_THd[decode.tokens] = attend_decode(q_THd[decode.tokens], pool, context.decode_pages, self._scale)
        for row, pages in zip(prefill, context.prefill_pages, strict=True):
            own = slice(row.begin, row.end)
            out_THd[own] = attend_prefill(q_THd[own], k_TJd[own], v_TJd[own], pool, pages, self._scale)
        return out_THd

    def _attend_tile(
        self, q_GHd: torch.Tensor, k_GJd: torch.Tensor, v_GJd: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        pool = context.kv_layers[self._index]
        pages_G, offsets_G = context.places
        real = slice(*context.tile)
        if context.stored_T is None:  # else the whole tile lies in a shared page, which holds the same bits
            store_kv(pool, k_GJd[real], v_GJd[real], pages_G[real], offsets_G[real])
        pages = context.block_tables[0][: context.first_position // context.page_size + 1]
        return attend_tile(q_GHd, pool, pages, context.tile[1], self._scale).to(q_GHd.dtype)
