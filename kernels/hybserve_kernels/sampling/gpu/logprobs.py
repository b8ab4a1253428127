"""Log-probabilities on the device, in plain torch: few requests ask for them. Legend: R rows, C vocabulary."""

import torch

from hybserve_kernels.sampling.gpu.table import MOST_IDS


def logprob_rows(
    logits_RC: torch.Tensor, tokens_R: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities fp32 [R] of the given tokens, and of the ``top`` likeliest of each row: values fp32 and ids
    int64 [R, top], likeliest first, of equal ones the lower id first. NaN where the row is not finite."""
    rows, vocab = logits_RC.shape
    logits_RC = logits_RC.float()
    norm_R1 = torch.logsumexp(logits_RC, dim=-1, keepdim=True)
    own_R = (logits_RC.gather(1, tokens_R[:, None]) - norm_R1).squeeze(1)
    top = min(top, vocab)
    if top == 0:
        return own_R, own_R.new_empty(rows, 0), tokens_R.new_empty(rows, 0)
    # topk leaves open which of equal values it returns: order by (value, lower id) as one integer
    bits_RC = (logits_RC + 0.0).view(torch.int32)  # one zero, not two
    bits_RC = bits_RC ^ ((bits_RC >> 31) & 0x7FFFFFFF)
    rank_C = MOST_IDS - 1 - torch.arange(vocab, device=logits_RC.device)
    best = torch.topk(bits_RC.long() * MOST_IDS + rank_C, top, dim=-1).values
    ids = MOST_IDS - 1 - best % MOST_IDS
    return own_R, logits_RC.gather(1, ids) - norm_R1, ids
