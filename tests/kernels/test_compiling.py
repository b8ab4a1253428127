"""Kernels that other processes compiled are found in the cache. Each case is a process of its own: where there is no
GPU, this one interprets kernels."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os
from types import SimpleNamespace

import torch
import triton
from hybserve_kernels.compiling import compiled_ahead, compilers_at_hand
from hybserve_kernels.copies import copy_runs
from hybserve_kernels.swiglu import gpu
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

target = GPUTarget("cuda", 90, 32)
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
))
cache = os.environ["TRITON_CACHE_DIR"]


def work():
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        gpu.swiglu(torch.zeros(3, 64, dtype=dtype))
    copy_runs(torch.zeros(4, 64, dtype=torch.uint8), torch.tensor([[1, 2]], dtype=torch.int32))


def entries():
    return {name for _, _, names in os.walk(cache) for name in names if name.endswith(".cubin")}, set(os.listdir(cache))


def ahead():
    with compiled_ahead():
        work()


run = triton.JITFunction.run
{how}
kernels, before = entries()
assert len(kernels) == 2, kernels  # by name; one of them for two dtypes
assert triton.JITFunction.run is run
try:
    raise SystemExit(f"a child is left: {os.waitpid(-1, os.WNOHANG)}")
except ChildProcessError:
    pass
compiled = []
triton.JITFunction.run = lambda self, *args, warmup, **more: compiled.append(run(self, *args, warmup=True, **more))
work()
assert len(compiled) == 4 and None not in compiled
assert entries() == (kernels, before), "compiled again"
"""


@pytest.mark.parametrize(
    "how",
    ["ahead()", "with compilers_at_hand():\n    ahead()\n    ahead()"],
    ids=["compilers of its own", "compilers at hand"],
)
def test_launches_find_what_children_compiled(tmp_path, how):
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("{how}", how)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "not compiled ahead" not in ran.stderr.replace("the driver's utilities is not compiled ahead", "")
