"""Mixture of experts at the shape of Qwen3.5-35B-A3B: routing, experts, the sum with the shared expert; random scores.

The bytes of a row are those of the experts that are touched. ``SWEEP=1`` times other forms at each size of step too.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from hybserve_kernels.moe import moe_rows, reference
from hybserve_kernels.moe.gpu.blocks import Blocks
from hybserve_kernels.moe.gpu.groups import Groups, Tile
from hybserve_kernels.moe.gpu.pairs import Pairs
from hybserve_kernels.moe.gpu.route import route_blocks, route_pairs

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

DEVICE = "cuda"
EXPERTS, TOP_K, DIM, WIDTH = 256, 8, 2048, 512
SWEEP = os.environ.get("SWEEP") == "1"
CLOSE = {torch.float32: (1e-4, 1e-4), torch.float16: (4e-3, 4e-3), torch.bfloat16: (2e-2, 1e-2)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192, 16384)

_PAIRS = [
    Pairs(*shape)
    for shape in [
        (1, 2048, 4, 4, 512, 4),
        (2, 1024, 4, 2, 512, 4),
        (2, 2048, 8, 4, 512, 8),
        (4, 1024, 4, 8, 512, 8),
        (1, 2048, 8, 2, 512, 2),
    ]
]
_FEW = [
    Groups(16, Tile(*up), Tile(*down))
    for up, down in [
        ((64, 64, 4, 4), (64, 64, 4, 4)),
        ((64, 128, 4, 2), (64, 128, 4, 3)),
        ((32, 128, 4, 3), (32, 128, 4, 4)),
        ((32, 256, 4, 3), (64, 256, 4, 2)),
        ((32, 128, 2, 4), (128, 128, 4, 4)),
        ((16, 256, 4, 4), (32, 256, 4, 2)),
        ((128, 64, 4, 4), (128, 64, 4, 6)),
        ((64, 64, 4, 6), (64, 512, 4, 1)),
    ]
]
_MANY = [
    Blocks(*cut, Tile(*up), Tile(*down))
    for cut, up, down in [
        ((64, 0, 64), (128, 64, 8, 4), (128, 64, 4, 4)),
        ((64, 32, 64), (64, 64, 4, 3), (128, 64, 4, 4)),
        ((64, 32, 64), (128, 64, 8, 4), (256, 64, 8, 4)),
        ((128, 0, 128), (128, 64, 8, 4), (256, 64, 8, 4)),
        ((128, 0, 64), (128, 64, 8, 4), (128, 64, 4, 3)),
        ((128, 16, 64), (128, 64, 8, 4), (256, 64, 8, 3)),
        ((128, 32, 64), (128, 64, 8, 3), (256, 64, 8, 4)),
        ((128, 32, 64), (128, 64, 8, 4), (256, 64, 8, 4)),
    ]
]


class Model(NamedTuple):
    gate_up_E2FD: torch.Tensor
    down_EDF: torch.Tensor


class Step(NamedTuple):
    x_TD: torch.Tensor
    scores_TE: torch.Tensor
    shared_TD: torch.Tensor
    gate_T1: torch.Tensor
    tokens_1: torch.Tensor


def _model(count: int, dim: int, width: int, dtype: torch.dtype) -> Model:
    gate_up = torch.empty(count, 2 * width, dim, dtype=dtype, device=DEVICE).normal_(std=dim**-0.5)
    return Model(gate_up, torch.empty(count, dim, width, dtype=dtype, device=DEVICE).normal_(std=width**-0.5))


def _step(tokens: int, count: int, dim: int, dtype: torch.dtype, real: int | None = None) -> Step:
    shapes = [(tokens, dim), (tokens, count), (tokens, dim), (tokens, 1)]
    x, scores, shared, gate = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
    used = torch.tensor([tokens if real is None else real], dtype=torch.int32, device=DEVICE)
    return Step(x, scores, shared, gate, used)


def _call(model: Model, step: Step, top_k: int, form: Pairs | Groups | Blocks | None) -> torch.Tensor:
    x, scores, shared, gate, tokens = step
    return moe_rows(x, scores, top_k, True, *model, tokens, shared, gate, form=form)


def _forms(tokens: int) -> list[Pairs | Groups | Blocks | None]:
    if not SWEEP:
        return [None]
    if tokens <= 4:
        return [None, *_PAIRS]
    if tokens <= 16:
        return [None, *_PAIRS, *_FEW]
    return [None, *(_FEW if tokens <= 256 else _MANY)]


def check() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    small = Groups(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    for dtype in CLOSE:
        for tokens, form in ((3, None), (200, None), (65, small), (5, Pairs(2, 64, 4, 4, 64, 4))):
            model, step = _model(6, 96, 48, dtype), _step(tokens + 7, 6, 96, dtype, tokens)
            _check(model, step, 2, [form], list(range(tokens)))
    model = _model(EXPERTS, DIM, WIDTH, torch.bfloat16)
    for tokens in TOKENS:
        looked_at = list(range(0, tokens, max(1, tokens // 8)))
        _check(model, _step(tokens, EXPERTS, DIM, torch.bfloat16), TOP_K, _forms(tokens), looked_at)


def _check(
    model: Model, step: Step, top_k: int, forms: list[Pairs | Groups | Blocks | None], looked_at: list[int]
) -> None:
    weights, chosen = reference.route(step.scores_TE[looked_at], top_k, True)
    touched, chosen = torch.unique(chosen, return_inverse=True)
    gate_up, down = (weight[touched].float() for weight in model)
    want = reference.experts(step.x_TD[looked_at].float(), weights.float(), chosen, gate_up, down)
    want += step.shared_TD[looked_at].float() * torch.sigmoid(step.gate_T1[looked_at].float())
    rtol, atol = CLOSE[step.x_TD.dtype]
    for form in forms:
        got = _call(model, step, top_k, form)[looked_at].float()
        worst = (got - want).abs().max()
        assert torch.allclose(got, want, rtol=rtol, atol=atol), f"{_name(form)} {step.x_TD.shape}: {worst}"


def measure() -> list[Row]:
    torch.manual_seed(0)
    model = _model(EXPERTS, DIM, WIDTH, torch.bfloat16)
    rows = []
    for tokens in TOKENS:
        expert_bytes = 3 * WIDTH * DIM * 2
        steps = [
            _step(tokens, EXPERTS, DIM, torch.bfloat16) for _ in range(rounds_of(tokens * TOP_K * expert_bytes, 16))
        ]
        touched = sum(_touched(step) for step in steps) / len(steps)
        traffic = touched * expert_bytes + tokens * DIM * 2 * 3
        flops = tokens * TOP_K * 3 * WIDTH * DIM * 2
        for form in _forms(tokens):
            calls: list[Callable[[], object]] = [partial(_call, model, step, TOP_K, form) for step in steps]
            us = microseconds(calls, repeat=10 if tokens <= 256 else 3, least_calls=16 if tokens <= 256 else 2)
            rows.append(Row("moe", f"M2 {tokens}", _name(form), us, traffic, flops))
        rows += _time_routing(tokens, steps)
    return rows


def _touched(step: Step) -> int:
    return int(torch.unique(reference.route(step.scores_TE, TOP_K, True)[1]).numel())


def _time_routing(tokens: int, steps: list[Step]) -> list[Row]:
    pairs: list[Callable[[], object]]
    blocks: list[Callable[[], object]]
    pairs = [partial(route_pairs, step.scores_TE, TOP_K, True, step.tokens_1) for step in steps]
    blocks = [partial(route_blocks, step.scores_TE, TOP_K, True, step.tokens_1, 16) for step in steps]
    traffic = tokens * (EXPERTS * 2 + TOP_K * 6)
    return [
        Row("moe", f"M2 {tokens}", name, microseconds(calls, repeat=5), traffic)
        for name, calls in (("routing, pairs", pairs), ("routing, blocks", blocks))
    ]


def _name(form: Pairs | Groups | Blocks | None) -> str:
    if form is None:
        return ""
    if isinstance(form, Pairs):
        return "pairs " + " ".join(map(str, form))
    rows = form.rows if isinstance(form, Groups) else " ".join(map(str, form[:3]))
    return f"{rows}: {' '.join(map(str, form.up))}, {' '.join(map(str, form.down))}"
