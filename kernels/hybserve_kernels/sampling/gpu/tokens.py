"""The token pool: what every running sequence sampled last, kept on the device.

Legend: T packed tokens, S sequence indices, R sampled rows.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit
def _gather_kernel(tokens_ptr, seqs_ptr, last_ptr, ids_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    token = tl.load(tokens_ptr + at, mask=mask, other=0).to(tl.int64)
    sampled = mask & (token < 0)
    seq = tl.load(seqs_ptr + at, mask=sampled, other=0)
    last = tl.load(last_ptr + seq, mask=sampled, other=0).to(tl.int64)
    tl.store(ids_ptr + at, tl.where(sampled, last, token), mask=mask)


@triton.jit
def _remember_kernel(last_ptr, seqs_ptr, tokens_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    seq = tl.load(seqs_ptr + at, mask=mask, other=-1)
    token = tl.load(tokens_ptr + at, mask=mask, other=0)
    tl.store(last_ptr + seq, token, mask=seq >= 0)


def gather_tokens(tokens_T: torch.Tensor, seqs_T: torch.Tensor, last_token_S: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [T]: ``tokens_T``, where it is -1 what the sequence sampled last. All int32 or int64."""
    assert tokens_T.shape == seqs_T.shape, "one sequence per token"
    ids_T = torch.empty(tokens_T.shape[0], dtype=torch.int64, device=tokens_T.device)
    count = tokens_T.shape[0]
    if count:
        _gather_kernel[(triton.cdiv(count, _BLOCK),)](tokens_T, seqs_T, last_token_S, ids_T, count, _BLOCK)
    return ids_T


def remember(last_token_S: torch.Tensor, seqs_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
    """Write what rows sampled to the pool. Rows with a negative sequence are padding; no sequence stands twice."""
    assert tokens_R.shape == seqs_R.shape, "one sequence per token"
    count = seqs_R.shape[0]
    if count:
        _remember_kernel[(triton.cdiv(count, _BLOCK),)](last_token_S, seqs_R, tokens_R, count, _BLOCK)
