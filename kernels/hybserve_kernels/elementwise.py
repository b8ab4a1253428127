"""What several ops do to single elements in fp32, most of it in fewer instructions than the compiler finds."""

import triton
import triton.language as tl

#: The interpreter knows no assembler.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """``x`` as ``dtype`` has it, in fp32. Two at a time, for one is converted at an eighth of the pace."""
    if (dtype == tl.bfloat16) & (not _INTERPRETED):
        return tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def power_of_two(x):
    """2^x; 0 where that is no normal number."""
    if _INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def silu(x):
    """Without care for denormal numbers, which 1 + exp never is: that would double the work."""
    if _INTERPRETED:
        return x / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 y; mul.f32 y, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 y, y; add.f32 y, y, 0f3F800000; "
            "rcp.approx.ftz.f32 y, y; mul.f32 $0, $1, y; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
