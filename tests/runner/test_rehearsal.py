"""Whatever a step launches was rehearsed at the start, so that nothing is compiled while somebody waits. In a process
of its own, which only notes kernels and how they are specialised, for a GPU that need not be there."""

import os
import subprocess
import sys

import pytest

from tests.checkpoints import make_checkpoint

_PROGRAM = """
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from hybserve_kernels.rows import TILE
from hybserve_kernels.sampling import gather_tokens
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hybserve.models.registry import build_model
from hybserve.plan.result import EngineLimits
from hybserve.runner import device as executor
from hybserve.runner.device import DeviceExecutor
from hybserve.runner.graphs import buckets_of, exact_room
from hybserve.runner.main import Runner
from hybserve.runner.staging import Shape
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.split import split_ranks

target = GPUTarget("cuda", 90, 32)
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
))
noted = {}
run = triton.JITFunction.run


def hook(*, fn, compile, **_):
    noted[fn.name, compile["specialization_data"]] = None
    return True


knobs.runtime.jit_cache_hook = hook
triton.JITFunction.run = lambda self, *args, warmup=False, **more: run(self, *args, warmup=True, **more) and None
executor.compiled_ahead = nullcontext

spec = read_model_spec(Path(sys.argv[1]))
share = split_ranks(spec)[0]
limits = EngineLimits(64, 40, 12, 24, 4096, 2048, 2048, "bfloat16", "float32", "bfloat16", prefill_beside=1216)
model = build_model(spec, share, torch.bfloat16, triton=True)
device = Runner(model, spec, share, limits)._device
with torch.inference_mode():
    device.compile()
    rehearsed = len(noted)
    assert rehearsed > 15, noted
    draw = random.Random(1)
    shapes = device._usual_shapes(buckets_of(limits.max_running))
    for _ in range(40):
        decode = draw.choice([0, 0, 1, 3, 16, 23])
        prefill = min(draw.choice([1, 1, 2, 3, 5, 17]), limits.max_running - decode)
        tokens = draw.randint(prefill, limits.step_tokens - decode)
        need = Shape(tokens + decode, decode, prefill, tokens // TILE + prefill, draw.randint(1, 64), decode + prefill)
        shapes.append(exact_room(need, limits, device._staging.table_width))
    for shape in shapes:
        ids, seqs, step = device._staging.views(shape, device._tables_SM)
        gather_tokens(ids, seqs, device._last_token_S)
        model.forward(torch.zeros_like(ids, dtype=torch.int64), device._context(step))
        assert len(noted) == rehearsed, (shape, [name for name, _ in list(noted)[rehearsed:]])
"""


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_what_steps_launch_was_rehearsed(tmp_path, shape):
    path = make_checkpoint(tmp_path, shape)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
