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
def wait(EARLY: tl.constexpr):
    """``begin`` of a program that lets the next kernel be launched later, by ``let_next``."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next(now, EARLY: tl.constexpr):
    """If ``now``, the next kernel may be launched as soon as all programs have said so or ended, and there is room."""
    if EARLY:
        tl.inline_asm_elementwise(
            "{ .reg .pred now; setp.ne.s32 now, $1, 0; @now griddepcontrol.launch_dependents; mov.u32 $0, 0; }",
            "=r,r",
            [now.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch(pointers):
    """Brings the lines at ``pointers`` into the L2 cache. Not for the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
