"""Gated DeltaNet: projection, causal convolution over cat(q, k, v), gated delta rule, gated norm, projection.

Legend: T packed tokens, N rows, I key heads, U value heads, K key dim, V value dim, D model dim, C channels under the
convolution = 2·I·K + U·V, W conv width; I and U are this rank's.
"""

from collections.abc import Iterator

import torch
from hybserve_kernels.causal_conv import causal_conv, conv_rows, conv_taps, conv_update
from hybserve_kernels.gated_delta import (
    decay_and_strength,
    decode_rows,
    scan,
    scan_rows,
    step,
    unit_queries_keys,
    unit_scale,
)
from hybserve_kernels.rows import PrefillRows

from hybserve.layers.beside import beside
from hybserve.layers.linear import Linear, ReducedLinear
from hybserve.layers.norm import GatedRMSNorm, RMSNorm
from hybserve.layers.params import Params
from hybserve.layers.step_context import PrefillRow, StepContext
from hybserve.parallel.mesh import Mesh
from hybserve.spec.model_spec import GatedDeltaSpec
from hybserve.spec.split import width


class GatedDelta:
    """``index`` counts the recurrent layers of this rank: which pool views it uses."""

    def __init__(
        self, params: Params, name: str, hidden: int, spec: GatedDeltaSpec, eps: float, mesh: Mesh, index: int
    ) -> None:
        self._params, self._name, self._index = params, name, index
        self._key_heads, self._heads = width(mesh.share.key_heads), width(mesh.share.value_heads)
        self._key_dim, self._value_dim = spec.key_dim, spec.value_dim
        self._value_width = self._heads * spec.value_dim
        self._channels = 2 * self._key_heads * spec.key_dim + self._value_width
        self._in = Linear(params, f"{name}.in_proj", hidden, self._channels + self._value_width + 2 * self._heads)
        params.declare(f"{name}.conv.weight", self._channels, spec.conv_width)
        params.declare(f"{name}.A_log", self._heads, dtype=torch.float32)
        params.declare(f"{name}.dt_bias", self._heads, dtype=torch.float32)
        self._norm = GatedRMSNorm(params, f"{name}.norm", spec.value_dim, eps)
        self._out = ReducedLinear(params, f"{name}.out", self._value_width, hidden, mesh)

    def bind(self) -> None:
        self._in.bind()
        self._norm.bind()
        self._out.bind()
        self._taps = conv_taps(self._params[f"{self._name}.conv.weight"])
        self._rate = -self._params[f"{self._name}.A_log"].exp()
        self._dt_bias = self._params[f"{self._name}.dt_bias"]
        self._unit_scale = unit_scale(self._key_dim, self._rate.device)

    def __call__(self, x_TD: torch.Tensor, context: StepContext) -> torch.Tensor:
        tokens = x_TD.shape[0]
        mixed_TC, z, b_TU, a_TU = self._in(x_TD).split_with_sizes(
            (self._channels, self._value_width, self._heads, self._heads), dim=1
        )
        g_TU, beta_TU = decay_and_strength(a_TU, b_TU, self._rate, self._dt_bias)
        if context.deterministic:
            out_TUV = self._tile(mixed_TC, g_TU, beta_TU, context)
        else:
            out_TUV = self._rows(mixed_TC, g_TU, beta_TU, context)
        gated = self._norm(out_TUV, z.view(tokens, self._heads, self._value_dim))
        return self._out(gated.reshape(tokens, -1))

    def add_to(self, hidden_TD: torch.Tensor, norm: RMSNorm, context: StepContext) -> None:
        """Add the output for the norm of the residual stream to it, in place (Triton form)."""
        step = context.step
        assert step is not None
        projected_TX = self._in.of_norm(hidden_TD, norm)
        out_TX = torch.empty(hidden_TD.shape[0], self._value_width, dtype=hidden_TD.dtype, device=hidden_TD.device)
        with beside(hidden_TD.device, step.mixed) as rejoin:
            if step.prefill is not None:
                self._prefill_rows(projected_TX, context, step.prefill, out_TX)
        if step.decode is not None:
            decode_rows(
                projected_TX,
                context.windows[self._index],
                context.matrices[self._index],
                self._taps,
                self._rate,
                self._dt_bias,
                self._norm.weight,
                self._norm.eps,
                (self._key_heads, self._heads, self._key_dim, self._value_dim),
                step.decode,
                out_TX,
            )
        rejoin()
        self._out.add_to(hidden_TD, out_TX)

    def _prefill_rows(
        self, projected_TX: torch.Tensor, context: StepContext, rows: PrefillRows, out_TX: torch.Tensor
    ) -> None:
        tokens, device = projected_TX.shape[0], projected_TX.device
        heads = (self._key_heads, self._heads, self._key_dim, self._value_dim)
        qkv_TC = torch.empty(tokens, self._channels, dtype=projected_TX.dtype, device=device)
        g_TU, beta_TU = torch.empty(2, tokens, self._heads, dtype=torch.float32, device=device).unbind(0)
        windows, matrices = context.windows[self._index], context.matrices[self._index]
        conv_rows(projected_TX, windows, self._taps, self._rate, self._dt_bias, heads, rows, qkv_TC, g_TU, beta_TU)
        z_TUV = projected_TX[:, self._channels : self._channels + self._value_width]
        z_TUV = z_TUV.view(tokens, self._heads, self._value_dim)
        scan_rows(qkv_TC, g_TU, beta_TU, matrices, rows, heads, z_TUV, self._norm.weight, self._norm.eps, out_TX)

    def _heads_of(self, mixed_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit queries and keys [T, 2, I, K] and values [T, U, V]."""
        qk, v = mixed_TC.split_with_sizes((self._channels - self._value_width, self._value_width), dim=1)
        qk_T2IK = unit_queries_keys(qk.view(-1, 2, self._key_heads, self._key_dim), self._unit_scale)
        return qk_T2IK, v.view(-1, self._heads, self._value_dim)

    def _rows(
        self, mixed_TC: torch.Tensor, g_TU: torch.Tensor, beta_TU: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        matrices, windows = context.matrices[self._index], context.windows[self._index]
        decode, prefill = context.grouped
        if decode is not None and not prefill:
            qk_N2IK, v_NUV = self._heads_of(conv_update(mixed_TC, windows, decode.slots, self._taps))
            return step(qk_N2IK, v_NUV, g_TU, beta_TU, matrices, decode.slot_ids)
        if decode is None and len(prefill) == 1 and not prefill[0].cuts:
            row = prefill[0]
            qk_T2IK, v_TUV = self._heads_of(causal_conv(mixed_TC, windows, row.slot, self._taps, row.start == 0))
            return scan(qk_T2IK, v_TUV, g_TU, beta_TU, matrices, row.slot, row.start == 0)
        convolved_TC = torch.empty(mixed_TC.shape, dtype=mixed_TC.dtype)
        if decode is not None:
            convolved_TC[decode.tokens] = conv_update(mixed_TC[decode.tokens], windows, decode.slots, self._taps)
        for row in prefill:
            for own, fresh, export in _pieces(row):
                convolved_TC[own] = causal_conv(mixed_TC[own], windows, row.slot, self._taps, fresh)
                if export:
                    windows[export] = windows[row.slot]
        qk_T2IK, v_TUV = self._heads_of(convolved_TC)
        out_TUV = torch.empty(v_TUV.shape, dtype=torch.float32)
        if decode is not None:
            at = decode.tokens
            out_TUV[at] = step(qk_T2IK[at], v_TUV[at], g_TU[at], beta_TU[at], matrices, decode.slot_ids)
        for row in prefill:
            for own, fresh, export in _pieces(row):
                out_TUV[own] = scan(qk_T2IK[own], v_TUV[own], g_TU[own], beta_TU[own], matrices, row.slot, fresh)
                if export:
                    matrices[export] = matrices[row.slot]
        return out_TUV

    def _tile(
        self, mixed_GC: torch.Tensor, g_GU: torch.Tensor, beta_GU: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        """The one scan of the deterministic mode: token after token, every op on the shape of a single token, so that
        prefill and decode give the same bits. Elementwise work on all tokens runs on the whole tile."""
        matrices, windows = context.matrices[self._index], context.windows[self._index]
        slots, slot = context.slots_N, context.slots[0]
        low, high = context.tile
        if context.first_position == 0:
            matrices[slot].zero_()
            windows[slot].zero_()
        convolved_GC = torch.zeros(mixed_GC.shape, dtype=mixed_GC.dtype)
        for t in range(low, high):
            convolved_GC[t : t + 1] = conv_update(mixed_GC[t : t + 1], windows, slots, self._taps)
        qk_G2IK, v_GUV = self._heads_of(convolved_GC)
        out_GUV = torch.zeros(v_GUV.shape, dtype=torch.float32)
        for t in range(low, high):
            one = slice(t, t + 1)
            out_GUV[one] = step(qk_G2IK[one], v_GUV[one], g_GU[one], beta_GU[one], matrices, [slot])
        return out_GUV


def _pieces(row: PrefillRow) -> Iterator[tuple[slice, bool, int]]:
    """The row cut at the checkpoints inside it: tokens, whether they begin from the zero state, and the slot that the
    state after them goes to (0 = none)."""
    begin = row.begin
    for tokens, slot in [*row.cuts, (row.end - row.begin, 0)]:
        end = row.begin + tokens
        yield slice(begin, end), row.start == 0 and begin == row.begin, slot
        begin = end
