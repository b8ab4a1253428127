"""The decode recurrence of a Gated DeltaNet layer beside the same in fp64, token after token.

``decode_rows`` runs as in the engine, with activations in fp32 so that nothing but the state is rounded. Inputs are
random and shaped as trained models have them: unit queries and keys that share a part (they come out of a SiLU), and
each head its own pace of forgetting, which varies from token to token. Heads write much or little (``WRITES``): where
they write little, what a state forgets and learns at a token is far below the distance of two bf16 values. The
convolution passes on its newest input alone.

Legend: N rows, U value heads, I key heads, K key dim, V value dim, X columns of a projection.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hybserve_kernels.gated_delta import decode_rows
from hybserve_kernels.gated_delta.reference import L2_EPS
from hybserve_kernels.rows import DecodeRows

from bench.state_quality.replay import repeated

#: Key heads, value heads, key dim, value dim of Qwen3.5-9B and -35B.
M1 = (16, 32, 128, 128)
#: Tokens after which the error is told; each a multiple of WINDOW.
MARKS = (16, 256, 4096, 32768)
#: Tokens before a mark whose outputs are compared.
WINDOW = 16
#: What beta is the sigmoid of, on average: of much writing a half, of little 1/400.
WRITES = {"much": 0.0, "little": -6.0}
#: What a head forgets at one token on average: from the first head to the last one.
FORGETS = (0.1, 1e-4)
EPS = 1e-6
WIDTH = 4


class Error(NamedTuple):
    """Norm of the difference over norm of the truth, of every row and head: over the outputs of a window, and over the
    matrix after it."""

    writes: str
    tokens: int
    state: str
    outputs: torch.Tensor  # [N, U]
    matrices: torch.Tensor  # [N, U]


class Recurrence:
    """The same tokens through pools of each kind. ``step`` takes WINDOW tokens."""

    def __init__(self, heads: tuple[int, int, int, int], rows: int, writes: str, device: str) -> None:
        self._heads, self._beta = heads, WRITES[writes]
        key_heads, value_heads, key_dim, value_dim = heads
        self._channels = 2 * key_heads * key_dim + value_heads * value_dim
        self._shape = (rows, value_heads, key_dim, value_dim)
        pool = (rows + 1, *self._shape[1:])
        self._matrices = {
            "fp32": torch.zeros(pool, device=device),
            "bf16, stochastic": torch.zeros(pool, device=device, dtype=torch.bfloat16),
            "bf16, nearest": torch.zeros(pool, device=device),
        }
        self._truth = torch.zeros(rows * value_heads, key_dim, value_dim, device=device, dtype=torch.float64)
        self._windows = torch.zeros(rows + 1, self._channels, WIDTH - 1, device=device)
        self._taps = torch.zeros(WIDTH, self._channels, device=device)
        self._taps[-1] = 1.0
        self.forgets_U = torch.logspace(math.log10(FORGETS[0]), math.log10(FORGETS[1]), value_heads, device=device)
        self._rate = torch.full((value_heads,), -4.0, device=device)
        steps = torch.log1p(-self.forgets_U) / self._rate
        self._dt_bias = steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus
        self._weight = torch.ones(value_dim, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        slots = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
        self._rows = DecodeRows(rows, self._lengths, slots, slots[:, None])
        self._tokens = torch.empty(
            WINDOW, rows, self._channels + value_heads * (value_dim + 2), device=device
        )  # q, k, v, z, b, a
        outputs = (WINDOW, rows, value_heads, value_dim)
        self._outputs = {name: torch.empty(outputs, device=device) for name in self._matrices}
        self._true_outputs = torch.empty(outputs, device=device, dtype=torch.float64)

    def step(self) -> None:
        self._tokens.normal_()
        value_heads = self._shape[1]
        self._tokens[..., -2 * value_heads : -value_heads] += self._beta
        self._tokens[..., -value_heads:] *= 0.5  # what the pace of forgetting varies by
        self._true(self._tokens.double())
        for token in range(WINDOW):
            self._lengths += 1
            for name, matrices in self._matrices.items():
                decode_rows(
                    self._tokens[token],
                    self._windows,
                    matrices,
                    self._taps,
                    self._rate,
                    self._dt_bias,
                    self._weight,
                    EPS,
                    self._heads,
                    self._rows,
                    self._outputs[name][token].flatten(1),
                )
            nearest = self._matrices["bf16, nearest"]
            nearest.copy_(nearest.bfloat16())

    def reset(self) -> None:
        for tensor in (*self._matrices.values(), self._truth, self._windows, self._lengths):
            tensor.zero_()

    def _true(self, tokens: torch.Tensor) -> None:
        """``gated_delta.reference`` and the gated norm in fp64."""
        key_heads, value_heads, key_dim, value_dim = self._heads
        rows = tokens.shape[1]
        keys, values = key_heads * key_dim, value_heads * value_dim
        q, k, v, z, b, a = tokens.split_with_sizes([keys, keys, values, values, value_heads, value_heads], dim=2)
        q, k = (F.silu(x).view(WINDOW, rows, key_heads, key_dim) for x in (q, k))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        q, k = (x.repeat_interleave(value_heads // key_heads, dim=2).view(WINDOW, -1, 1, key_dim) for x in (q, k))
        v = F.silu(v).view(WINDOW, -1, 1, value_dim)
        decay = (self._rate.double() * F.softplus(a + self._dt_bias.double())).exp().view(WINDOW, -1, 1, 1)
        beta = b.sigmoid().view(WINDOW, -1, 1, 1)
        for token in range(WINDOW):
            self._truth *= decay[token]
            change = beta[token] * (v[token] - k[token] @ self._truth)
            self._truth.baddbmm_(k[token].mT, change)
            o = (q[token] @ self._truth).view(rows, value_heads, value_dim) * key_dim**-0.5
            normed = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + EPS)
            self._true_outputs[token] = normed * F.silu(z[token]).view(o.shape)

    def errors(self, writes: str, tokens: int) -> Iterator[Error]:
        truth = self._truth.view(self._shape)
        for name, matrices in self._matrices.items():
            outputs = _relative(self._outputs[name], self._true_outputs, (0, 3))
            yield Error(writes, tokens, name, outputs, _relative(matrices[1:], truth, (2, 3)))
        rounded = self._true_outputs.bfloat16()
        yield Error(writes, tokens, "(outputs in bf16)", _relative(rounded, self._true_outputs, (0, 3)), torch.zeros(1))


def _relative(value: torch.Tensor, truth: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    return ((value.double() - truth).square().sum(over) / truth.square().sum(over)).sqrt().cpu()


def measure(
    heads: tuple[int, int, int, int], rows: int, marks: tuple[int, ...], device: str
) -> tuple[list[Error], torch.Tensor]:
    """Errors at each mark; what each value head forgets at a token on average [U]."""
    errors: list[Error] = []
    for writes in WRITES:
        torch.manual_seed(0)
        recurrence = Recurrence(heads, rows, writes, device)
        run = repeated(recurrence.step, recurrence.reset, device)
        for done in range(WINDOW, marks[-1] + 1, WINDOW):
            run()
            if done in marks:
                errors += recurrence.errors(writes, done)
    return errors, recurrence.forgets_U.cpu()
