"""Prefill rows through the gated delta rule and the gated norm, at the heads of Qwen3.5-9B and -35B.

``check`` compares with the recurrence in fp32 and in fp64 and bounds the error by what the products of the kernel round
away, which ``_rounded`` tells. ``SWEEP=1`` times every shape of launch in ``SHAPES`` too and prints the best ones.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from hybserve_kernels.gated_delta import reference, scan_rows
from hybserve_kernels.gated_delta.gpu.scan import SHAPES as CHOSEN
from hybserve_kernels.gated_delta.gpu.scan import Shape
from hybserve_kernels.rms_norm import reference as rms_norm
from hybserve_kernels.rows import TILE, PrefillRows
from triton.runtime.errors import TritonError

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

DEVICE = "cuda"
HEADS, EPS = (16, 32, 128, 128), 1e-6
SHAPES = [
    Shape(64, 4, 2),
    Shape(64, 4, 3),
    Shape(64, 4, 3, True),
    Shape(64, 4, 3, True, 16),
    Shape(64, 4, 3, True, 32),
    Shape(128, 8, 2),
    Shape(128, 8, 2, True),
]
#: The shape of one row alone in pieces as short as those of the check need to be.
PIECES = Shape(64, 4, 3, True, 1)
SWEEP = SHAPES if os.environ.get("SWEEP") == "1" else []
PEERS = {(1, 2048): 110.0, (1, 8192): 258.0, (1, 32768): 839.0, (8, 1024): 111.0, (4, 4096): 192.0}
#: What the bar of a factor 1.5 counts from.
FLA = {(1, 2048): 146.0, (1, 8192): 522.0, (1, 32768): 2048.0, (8, 1024): 488.0, (4, 4096): 939.0}
CASES = [(1, 128), *PEERS, (2, 4096), (64, 128)]
#: Rows of the check: tokens, position of the first, slot.
COUNTS, STARTS, SLOTS = [200, 1, 64, 129], [0, 64, 128, 0], [1, 2, 3, 4]
#: (tile, slot) of the one state exported, in the middle of the first row.
EXPORT = (1, 5)


class Inputs(NamedTuple):
    qkv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    z: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _rows(counts: list[int], starts: list[int], slots: list[int], exports: dict[int, int]) -> PrefillRows:
    tiles = [(row, offset) for row, count in enumerate(counts) for offset in range(0, count, TILE)]
    owners = [row for row, _ in tiles]
    return PrefillRows(
        len(counts),
        len(tiles),
        _ints([sum(counts[:row]) for row in range(len(counts))]),
        _ints(counts),
        _ints(starts),
        _ints(slots),
        torch.zeros(len(counts), 1, dtype=torch.int32, device=DEVICE),
        _ints([owners.index(row) for row in range(len(counts))]),
        _ints(owners),
        _ints([offset for _, offset in tiles]),
        _ints([exports.get(x, 0) for x in range(len(tiles))]),
    )


def _inputs(tokens: int, dtype: torch.dtype) -> Inputs:
    key_heads, value_heads, key_dim, value_dim = HEADS
    q, k = reference.unit_queries_keys(*torch.randn(2, tokens, key_heads, key_dim, device=DEVICE).unbind(0))
    v = torch.randn(tokens, value_heads * value_dim, device=DEVICE)
    qkv = torch.cat([q.flatten(1), k.flatten(1), v], dim=1).to(dtype)
    z = torch.randn(tokens, value_heads, value_dim, device=DEVICE, dtype=dtype)
    gates = -(torch.rand(tokens, value_heads, device=DEVICE) ** 4), torch.rand(tokens, value_heads, device=DEVICE)
    weight = torch.rand(value_dim, device=DEVICE).to(dtype) + 0.5
    out = torch.full((tokens, value_heads * value_dim), float("nan"), dtype=dtype, device=DEVICE)
    return Inputs(qkv, *gates, z, weight, out)


def _run(inputs: Inputs, matrices: torch.Tensor, rows: PrefillRows, shape: Shape | None) -> None:
    scan_rows(*inputs[:3], matrices, rows, HEADS, *inputs[3:5], EPS, inputs.out, shape)


Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in fp64."""
    group = v.shape[1] // k.shape[1]
    q, k = (x.double().repeat_interleave(group, 1) for x in (q, k))
    v, decay, beta, state = v.double(), g.double().exp(), beta.double(), state.double()
    outputs = []
    for t in range(len(q)):
        state = state * decay[t][:, None, None]
        change = beta[t][:, None] * (v[t] - (k[t][:, None] @ state)[:, 0])
        state = state + k[t][:, :, None] * change[:, None]
        outputs.append((q[t][:, None] @ state)[:, 0])
    return torch.stack(outputs), state


def _rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's formula with factors rounded where the kernel rounds them, products and sums in fp32."""
    dtype, group = q.dtype, v.shape[1] // k.shape[1]
    q, k, v, g, beta = (x.float().transpose(0, 1) for x in (q, k, v, g, beta))
    q, k = q.repeat_interleave(group, 0), k.repeat_interleave(group, 0)
    state, outputs = state.float(), []

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    for begin in range(0, q.shape[1], TILE):
        q_x, k_x, v_x, g_x, beta_x = (x[:, begin : begin + TILE] for x in (q, k, v, g, beta))
        sums = g_x.cumsum(1)
        pair = (sums[:, :, None] - sums[:, None]).tril().exp().tril()
        lower = (k_x @ k_x.mT * pair * beta_x[:, :, None]).tril(-1)
        solve = narrow(_inverse(lower, torch.float32 if dtype == torch.float32 else torch.float16) * beta_x[:, None])
        fall, kept = sums.exp()[:, :, None], narrow(state)
        change = solve @ narrow(v_x - fall * (k_x @ kept))
        outputs.append(fall * (q_x @ kept) + narrow(q_x @ k_x.mT * pair) @ narrow(change))
        last = sums[:, -1:]
        state = state * last.exp()[:, :, None] + k_x.mT @ narrow(change * (last - sums).exp()[:, :, None])
    return narrow(torch.cat(outputs, 1).transpose(0, 1)), state


def _inverse(lower: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    at = torch.arange(lower.shape[1], device=lower.device)
    row, column = at[:, None], at[None]
    inverse = (row == column).float() - lower * (row // 2 == column // 2)
    for size in (2, 4, 8, 16, 32):
        below = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        narrow, new = inverse.to(dtype).float(), (lower * below).to(dtype).float()
        inverse = inverse - (narrow @ new).to(dtype).float() @ narrow
    return inverse


class Case(NamedTuple):
    """``exact``, ``wide`` and ``rounded``: name -> what the recurrence in fp64 and in fp32 and ``_rounded`` give."""

    inputs: Inputs
    matrices: torch.Tensor
    exact: dict[str, torch.Tensor]
    wide: dict[str, torch.Tensor]
    rounded: dict[str, torch.Tensor]


def _case(dtype: torch.dtype, state_dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    _, value_heads, key_dim, value_dim = HEADS
    inputs = _inputs(sum(COUNTS), dtype)
    shape = (7, 2, value_heads, key_dim, value_dim)
    matrices = torch.full(shape, float("nan"), dtype=state_dtype, device=DEVICE)[:, 1]
    matrices[2:4].normal_()
    exact, wide, rounded = (_through(form, inputs, matrices) for form in (_exact, reference.recurrent, _rounded))
    rounded = {name: x if name.startswith("out") else x.to(state_dtype) for name, x in rounded.items()}
    return Case(inputs, matrices, exact, wide, rounded)


def _through(form: Form, inputs: Inputs, matrices: torch.Tensor) -> dict[str, torch.Tensor]:
    key_heads, value_heads, key_dim, value_dim = HEADS
    results = {}
    for row, (count, start, slot) in enumerate(zip(COUNTS, STARTS, SLOTS, strict=True)):
        own = slice(sum(COUNTS[:row]), sum(COUNTS[: row + 1]))
        qk, v = inputs.qkv[own, : 2 * key_heads * key_dim], inputs.qkv[own, 2 * key_heads * key_dim :]
        q, k = qk.reshape(count, 2, key_heads, key_dim).unbind(1)
        v = v.reshape(count, value_heads, value_dim)
        parts = (q, k, v, inputs.g[own], inputs.beta[own])
        state = matrices[slot] if start else torch.zeros_like(matrices[slot])
        o, end = form(*parts, state)
        results[f"out {count}"] = rms_norm.rms_norm_gated(o, inputs.z[own], inputs.weight, EPS).flatten(1)
        results[f"state {count}"] = end
        if row == 0:
            _, end = form(*(part[: (EXPORT[0] + 1) * TILE] for part in parts), state)
            results["export"] = end
    return results


def _launched(case: Case, shape: Shape | None) -> dict[str, torch.Tensor]:
    """What the kernel gives, under the names of a case."""
    matrices = torch.empty_strided(
        case.matrices.shape, case.matrices.stride(), dtype=case.matrices.dtype, device=DEVICE
    )
    matrices.copy_(case.matrices)
    case.inputs.out.fill_(float("nan"))
    _run(case.inputs, matrices, _rows(COUNTS, STARTS, SLOTS, dict([EXPORT])), shape)
    torch.cuda.synchronize()
    assert bool(matrices[[0, 6]].isnan().all()), "a slot that no row owns was written"
    outs = torch.split(case.inputs.out, COUNTS)
    results = {f"out {count}": out for count, out in zip(COUNTS, outs, strict=True)}
    results |= {f"state {count}": matrices[slot] for count, slot in zip(COUNTS, SLOTS, strict=True)}
    return results | {"export": matrices[EXPORT[1]]}


def _errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative, of the whole tensor."""
    wide = {name: tensor.double() for name, tensor in want.items()}
    return {name: ((got[name].double() - true).norm() / true.norm()).item() for name, true in wide.items()}


def _line(label: str, errors: dict[str, float]) -> str:
    return f"{label:<17}" + " ".join(f"{error * 1e4:6.3g}" for error in errors.values())


def _flaw(case: Case, shape: Shape | None) -> tuple[str, dict[str, float]]:
    """What is wrong with a shape of launch, empty if nothing; errors against fp64."""
    try:
        got = _launched(case, shape)
    except (AssertionError, RuntimeError, TritonError) as error:
        return f"{type(error).__name__} {str(error)[:120]}", {}
    errors = _errors(got, case.exact)
    bounds = _errors(case.rounded, case.exact)
    wrong = [name for name in errors if not errors[name] < 2 * bounds[name] + 1e-4]
    return f"{len(wrong)} too far" if wrong else "", errors


def _exactly() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False


def check() -> None:
    """Prints errors against fp64 in units of 1e-4 (o: output, s: state of the row of so many tokens). A shape of the
    sweep that fails is only named, and ``measure`` leaves it out; with a sweep nothing raises, so that it is timed."""
    _exactly()
    flaws = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for state_dtype in (torch.bfloat16, torch.float32):
            case = _case(dtype, state_dtype)
            names = f"{str(dtype)[6:]} {str(state_dtype)[6:]}"
            print(
                f"{names:<17}" + " ".join(f"{name.replace('state', 's').replace('out', 'o'):>6}" for name in case.exact)
            )
            print(_line(" expected", _errors(case.rounded, case.exact)))
            plain = dtype == torch.bfloat16 and state_dtype == torch.float32
            for shape in [None, *([*CHOSEN.values(), PIECES, *SWEEP] if plain else [])]:
                flaw, errors = _flaw(case, shape)
                label = " ".join(map(str, shape or ("default",)))
                print(_line(f" {label}", errors), flaw, flush=True)
                if plain and shape is None and errors:
                    print(_line(" against fp32", _errors(_launched(case, shape), case.wide)))
                if flaw and (shape not in SWEEP or shape in CHOSEN.values()):
                    flaws.append(f"{names} {label}: {flaw}")
    for rows, _ in CASES:
        _call([TILE] * rows, torch.float32)(None)
    torch.cuda.synchronize()
    print("\n".join(f"FAILED {flaw}" for flaw in flaws))
    assert SWEEP or not flaws


def _call(counts: list[int], state_dtype: torch.dtype) -> Callable[[Shape | None], None]:
    _, value_heads, key_dim, value_dim = HEADS
    matrices = torch.randn(len(counts) + 1, value_heads, key_dim, value_dim, device=DEVICE).to(state_dtype)
    rows = _rows(counts, [0] * len(counts), [1 + row for row in range(len(counts))], {})
    inputs = _inputs(sum(counts), torch.bfloat16)
    return lambda shape: _run(inputs, matrices, rows, shape)


def measure() -> list[Row]:
    _exactly()
    case = _case(torch.bfloat16, torch.float32)
    sound = []
    for shape in SWEEP:
        flaw, _ = _flaw(case, shape)
        if flaw:
            print(f"# left out {tuple(shape)}: {flaw}")
        else:
            sound.append(shape)
    rows, times = [], {}
    for key in CASES:
        timed = _times(key, torch.float32, [None, *sound])
        rows += timed
        times[key] = dict(zip(sound, [row.us for row in timed[1:]], strict=True))
    rows += _times((8, 1024), torch.bfloat16, [None])
    if sound:
        _best(times)
    return rows


def _best(times: dict[tuple[int, int], dict[Shape, float]]) -> None:
    """The shape of the least time for each case, and for each number of rows over its cases."""
    for (count, tokens), of_shape in times.items():
        ranked = sorted(of_shape, key=of_shape.__getitem__)[:3]
        print(f"# {count}x{tokens}: " + ", ".join(f"{tuple(shape)} {of_shape[shape]:.1f} µs" for shape in ranked))
    for count in sorted({count for count, _ in times}):
        own = [of_shape for (rows, tokens), of_shape in times.items() if rows == count and tokens > TILE * 2]
        own = own or [of_shape for (rows, _), of_shape in times.items() if rows == count]
        best = min(own[0], key=lambda shape: math.prod(of_shape[shape] for of_shape in own))
        most = "1 << 30" if count == max(rows for rows, _ in times) else count
        print(f"#     {most}: Shape{tuple(best)},")


def _times(key: tuple[int, int], state_dtype: torch.dtype, shapes: list[Shape | None]) -> list[Row]:
    key_heads, value_heads, key_dim, value_dim = HEADS
    count, tokens = key[0], key[0] * key[1]
    traffic = 2 * tokens * (2 * key_heads * key_dim + 3 * value_heads * value_dim)
    traffic += count * value_heads * key_dim * value_dim * state_dtype.itemsize
    tiles = count * -(-key[1] // TILE)
    products = 2 * key_dim + value_dim + 2 * value_dim * key_dim * 3 // TILE // 2 + TILE
    flops = 2.0 * tiles * value_heads * TILE * TILE * products
    calls = [_call([key[1]] * count, state_dtype) for _ in range(rounds_of(traffic, 8))]
    peer = PEERS.get(key) if state_dtype == torch.float32 else None
    whose = f"CuTe; FLA {FLA[key]:.0f}" if peer else ""
    name = f"{count}x{key[1]}" + ("" if state_dtype == torch.float32 else " bf16 state")
    rows = []
    for shape in shapes:
        us = microseconds([partial(call, shape) for call in calls], repeat=5, least_calls=4)
        rows.append(Row("gated_delta_scan", name, " ".join(map(str, shape or ())), us, traffic, flops, peer, whose))
    return rows
