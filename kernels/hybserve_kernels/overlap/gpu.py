"""For kernels that are launched with ``launch_pdl`` = ``EARLY``: what they do before and after ``begin`` differs.

Every program calls it once, whatever else it does, so that the end of a kernel implies the end of all before it.
"""

import triton
import triton.language as tl


@triton.jit
def begin(EARLY: tl.constexpr):
    """Lets the next kernel be launched as soon as there is room, then waits until all kernels before this one have
    ended. Before it a program may read weights and nothing else, and writes nothing."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, EARLY: tl.constexpr):
    """Brings the lines at ``pointers`` into the L2 cache, if ``begin`` is still to be called."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
