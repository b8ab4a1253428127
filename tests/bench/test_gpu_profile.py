"""Shares of a timeline."""

import pytest

from bench.gpu_profile import IDLE, Kernel, breakdown, kernels_of, steps_before


def kernel(name: str, begin: float, end: float) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


def test_a_kernel_has_the_time_by_which_it_prolongs_what_ran_before() -> None:
    trace = {
        "traceEvents": [
            kernel("_rms_norm_kernel", 5.0, 12.0),  # waits inside until 10
            kernel("nvjet_sm90_tst", 0.0, 10.0),
            kernel("_tiles_kernel", 14.0, 20.0),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 99.0},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 20.0, "dur": 1.0},
            kernel("something", 15.0, 16.0),  # beside another
        ]
    }
    parts = breakdown(kernels_of(trace))
    assert parts == {
        "products (library)": 10.0,
        "products (own, few rows)": 6.0,
        "norms": 2.0,
        IDLE: 2.0,
        "to and from the host": 1.0,
        "rest": 0.0,
    }
    assert sum(parts.values()) == 21.0


def test_steps_begin_after_the_step_before_them() -> None:
    names = ["_attend", "_remember_kernel"] * 3
    kernels = [Kernel(name, float(at), at + 1.0) for at, name in enumerate(names)]
    assert [kernel.begin for kernel in steps_before(kernels, 2, after=0)] == [2.0, 3.0, 4.0, 5.0]
    assert [kernel.begin for kernel in steps_before(kernels, 1, after=1)] == [2.0, 3.0]
    with pytest.raises(ValueError, match="3 steps"):
        steps_before(kernels, 2, after=1)
