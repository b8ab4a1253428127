"""RMS norm with and without the residual sum, and SwiGLU, on the widths of Qwen3.5-9B and 35B-A3B."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from hybserve_kernels.rms_norm import gpu as norms
from hybserve_kernels.rms_norm import reference as norm_reference
from hybserve_kernels.swiglu import gpu as activations
from hybserve_kernels.swiglu import reference as activation_reference

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of

ROWS = (1, 8, 64, 256, 2048, 8192)
_DTYPE, _EPS = torch.bfloat16, 1e-6
#: µs measured for vLLM's kernels: (op, rows) to time.
_PEERS = {("add_rms_norm", 8192): 67.0, ("add_rms_norm", 64): 2.7, ("swiglu", 8192): 140.0, ("swiglu", 64): 2.9}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=_DTYPE)


def check() -> None:
    for rows, width in ((1, 4096), (65, 4096), (7, 2048), (33, 1000), (300, 64)):
        torch.manual_seed(0)
        hidden, delta, scale = _random(rows, width), _random(rows, width), torch.rand(width, device="cuda")
        total = hidden + delta
        got = norms.rms_norm(hidden, scale, _EPS, delta_TD=delta)
        assert torch.equal(hidden, total), (rows, width)
        torch.testing.assert_close(got, norm_reference.rms_norm(total, scale, _EPS), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(norms.rms_norm(hidden, scale, _EPS), got, rtol=0, atol=0)
        gate_up = _random(rows, 2 * width)
        torch.testing.assert_close(
            activations.swiglu(gate_up), activation_reference.swiglu(gate_up), rtol=1e-2, atol=1e-2
        )


def measure() -> list[Row]:
    found = []
    for width, ffn in ((4096, 12288), (2048, 512)):
        scale = torch.rand(width, device="cuda")
        for rows in ROWS:
            found += _norms(rows, width, scale)
            found += _activations(rows, ffn)
    return found


def _norms(rows: int, width: int, scale: torch.Tensor) -> list[Row]:
    size = 2 * rows * width
    inputs = [(_random(rows, width), _random(rows, width)) for _ in range(rounds_of(4 * size))]

    def add_norm(hidden: torch.Tensor, delta: torch.Tensor) -> object:
        return norms.rms_norm(hidden, scale, _EPS, delta_TD=delta)

    def norm(hidden: torch.Tensor, delta: torch.Tensor) -> object:
        return norms.rms_norm(hidden, scale, _EPS)

    def add(hidden: torch.Tensor, delta: torch.Tensor) -> object:
        return hidden.add_(delta)

    shape = f"{rows}x{width}"
    peer = _PEERS.get(("add_rms_norm", rows)) if width == 4096 else None
    return [
        Row("rms_norm", shape, "add_rms_norm", _time(add_norm, inputs), 4 * size, 0, peer, "vLLM" if peer else ""),
        Row("rms_norm", shape, "rms_norm", _time(norm, inputs), 2 * size),
        Row("rms_norm", shape, "torch add_", _time(add, inputs), 3 * size),
    ]


def _activations(rows: int, ffn: int) -> list[Row]:
    size = 2 * rows * ffn
    inputs = [(_random(rows, 2 * ffn),) for _ in range(rounds_of(3 * size))]

    def by_torch(gate_up: torch.Tensor) -> object:
        return F.silu(gate_up[:, :ffn]).mul_(gate_up[:, ffn:])

    shape = f"{rows}x{2 * ffn}"
    peer = _PEERS.get(("swiglu", rows)) if ffn == 12288 else None
    return [
        Row("swiglu", shape, "swiglu", _time(activations.swiglu, inputs), 3 * size, 0, peer, "vLLM" if peer else ""),
        Row("swiglu", shape, "torch", _time(by_torch, inputs), 3 * size),
    ]


def _time(call: Callable[..., object], inputs: Sequence[tuple[torch.Tensor, ...]]) -> float:
    calls: list[Callable[[], object]] = [partial(call, *each) for each in inputs]
    return microseconds(calls)
