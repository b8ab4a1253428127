"""The specification of sampling, in torch, fp64 from the temperature on.

Legend: R rows to sample, C vocabulary, M candidates of a row, X scattered (row, token) pairs.

A draw is ``argmax(logit / temperature + gumbel(key, token id))`` over the tokens that the filters keep, which is an
exact sample of the softmax over them. Two runs whose logits differ by rounding then differ in their token only where
the two best *perturbed* logits nearly tie, as with greedy decoding. Ties of equal logits go to the lower id, in the
argmax and at the edge of every filter alike.
"""

from typing import NamedTuple

import torch

from hybserve_kernels.sampling.noise import gumbel

#: Candidates that are sorted for top-p at first; a larger nucleus takes this many times more, again and again.
_NUCLEUS = 64
_WIDEN = 16
#: Draws go in slices of about this many logits: the fp64 temporaries stay in the processor's cache.
_ELEMENTS = 1 << 15


class Filters(NamedTuple):
    """What shapes the distribution of each of R rows. Temperatures are positive; top_k 0, top_p 1, min_p 0 are off."""

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]

    def take(self, rows: list[int]) -> "Filters":
        return Filters(
            [self.temperature[row] for row in rows],
            [self.top_k[row] for row in rows],
            [self.top_p[row] for row in rows],
            [self.min_p[row] for row in rows],
        )


def greedy(logits_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token of each row (lowest id on a tie) and whether all its logits are finite."""
    tokens_R = logits_RC.argmax(dim=-1)  # of a NaN, if there is one
    high_R = logits_RC.gather(1, tokens_R[:, None]).squeeze(1)
    return tokens_R, torch.isfinite(high_R) & torch.isfinite(logits_RC.amin(dim=-1))


def penalise_(
    logits_RC: torch.Tensor,
    rows_X: torch.Tensor,
    ids_X: torch.Tensor,
    counts_X: torch.Tensor,
    repetition_R: torch.Tensor,
    presence_R: torch.Tensor,
    frequency_R: torch.Tensor,
) -> None:
    """Penalise tokens seen before, in place. Each pair (row, id) stands once; ``counts_X`` is how often the token was
    *generated* (0 = it stands in the prompt only).

    repetition (CTRL, arXiv 1909.05858): over prompt and output, positive logits are divided and negative ones
    multiplied. frequency and presence (OpenAI): over the output, ``count · frequency + (count > 0) · presence`` is
    subtracted afterwards.
    """
    values = logits_RC[rows_X, ids_X]
    repetition = repetition_R[rows_X]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts_X * frequency_R[rows_X] + (counts_X > 0) * presence_R[rows_X]
    logits_RC[rows_X, ids_X] = values


def add_bias_(logits_RC: torch.Tensor, rows_X: torch.Tensor, ids_X: torch.Tensor, bias_X: torch.Tensor) -> None:
    logits_RC.index_put_((rows_X, ids_X), bias_X, accumulate=True)


def mask_(logits_RC: torch.Tensor, rows_X: torch.Tensor, ids_X: torch.Tensor) -> None:
    """Make tokens impossible, in place."""
    logits_RC[rows_X, ids_X] = float("-inf")


def draw(logits_RC: torch.Tensor, filters: Filters, keys: list[int]) -> torch.Tensor:
    """One token per row from the softmax of ``logits / temperature`` over the tokens that the filters keep."""
    vocab = logits_RC.shape[1]
    keys_R = torch.tensor(keys, dtype=torch.int64, device=logits_RC.device)
    tokens_R = torch.empty_like(keys_R)
    cut = [_truncates(k, p, vocab) for k, p in zip(filters.top_k, filters.top_p, strict=True)]
    height = max(1, _ELEMENTS // vocab)
    for draw_some, kind in ((_draw_whole, False), (_draw_cut, True)):
        rows = [row for row, cuts in enumerate(cut) if cuts == kind]
        for low in range(0, len(rows), height):
            part = rows[low : low + height]
            some = filters.take(part)
            tokens_R[part] = draw_some(_scaled(logits_RC[part], some.temperature), some, keys_R[part])
    return tokens_R


def _draw_whole(scaled_RC: torch.Tensor, filters: Filters, keys_R: torch.Tensor) -> torch.Tensor:
    scores_RC = _above_min_p(scaled_RC, filters.min_p)
    for low in range(0, scores_RC.shape[1], _ELEMENTS):
        block = scores_RC[:, low : low + _ELEMENTS]
        block += gumbel(keys_R, torch.arange(low, low + block.shape[1], device=keys_R.device))
    return scores_RC.argmax(dim=-1)


def _draw_cut(scaled_RC: torch.Tensor, filters: Filters, keys_R: torch.Tensor) -> torch.Tensor:
    values_RM, ids_RM = kept(scaled_RC, filters)
    best_R1 = (values_RM + gumbel(keys_R, ids_RM)).argmax(dim=-1, keepdim=True)
    return ids_RM.gather(1, best_R1).squeeze(1)


def kept(scaled_RC: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that survive top-k, then top-p over the renormalised rest, then min-p: values [R, M] with -inf where
    a token is out, and their ids, likeliest first. ``scaled_RC`` are logits over temperature, in fp64.

    top-p keeps the smallest set whose probability reaches it; min-p those within that share of the likeliest.
    """
    vocab = scaled_RC.shape[1]
    top_k = [k if 0 < k < vocab else 0 for k in filters.top_k]
    depth = min(max(*top_k, _NUCLEUS if 0 in top_k else 1), vocab)
    while True:
        values_RM, ids_RM = ordered(scaled_RC, depth)
        keep_RM = _keep(scaled_RC, values_RM, top_k, filters.top_p)
        open_ended = any(last and k == 0 for last, k in zip(keep_RM[:, -1].tolist(), top_k, strict=True))
        if depth == vocab or not open_ended:
            return _above_min_p(values_RM.masked_fill(~keep_RM, float("-inf")), filters.min_p), ids_RM
        depth = min(depth * _WIDEN, vocab)


def token_logprobs(
    logits_RC: torch.Tensor, tokens_R: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities [R] of the given tokens and the ``top`` likeliest of each row: values and ids [R, top]."""
    logits_RC = logits_RC.float()
    norm_R1 = torch.logsumexp(logits_RC, dim=-1, keepdim=True)
    own_R = (logits_RC.gather(1, tokens_R[:, None]) - norm_R1).squeeze(1)
    values, ids = ordered(logits_RC, min(top, logits_RC.shape[1]))
    return own_R, values - norm_R1, ids


def ordered(values_RC: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row, larger first and of equal ones the lower id first, also at the border."""
    rows, width = values_RC.shape
    if count == 0:
        return values_RC[:, :0], torch.empty(rows, 0, dtype=torch.int64, device=values_RC.device)
    if count * 4 >= width:
        values_RM, ids_RM = torch.sort(values_RC, dim=-1, descending=True, stable=True)
        return values_RM[:, :count], ids_RM[:, :count]
    # topk leaves open which of equal values it returns, and in which order
    best_RM, ids_RM = torch.topk(values_RC, count + 1, dim=-1)
    ids_RM = ids_RM[:, :count].sort(dim=-1).values
    for row in torch.nonzero(best_RM[:, -1] == best_RM[:, -2]).flatten().tolist():
        ids_RM[row] = _reaching(values_RC[row], best_RM[row, -1], count)
    values_RM, order_RM = torch.sort(values_RC.gather(1, ids_RM), dim=-1, descending=True, stable=True)
    return values_RM, ids_RM.gather(1, order_RM)


def _reaching(values_C: torch.Tensor, edge: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest, ascending. ``edge`` is the smallest of them and stands more often than fits."""
    above = torch.nonzero(values_C > edge).flatten()
    level = torch.nonzero(values_C == edge).flatten()[: count - len(above)]
    return torch.cat((above, level)).sort().values


def _truncates(top_k: int, top_p: float, vocab: int) -> bool:
    return 0 < top_k < vocab or top_p < 1.0


def _scaled(logits_RC: torch.Tensor, temperature: list[float]) -> torch.Tensor:
    """Logits less the row's largest, over temperature: the largest is 0, so no temperature can overflow."""
    scaled_RC = logits_RC.double()
    high_R1 = scaled_RC.amax(dim=-1, keepdim=True)
    high_R1 = torch.where(torch.isfinite(high_R1), high_R1, 0.0)
    heat_R1 = torch.tensor(temperature, dtype=torch.float64, device=logits_RC.device)[:, None]
    return (scaled_RC - high_R1) / heat_R1


def _above_min_p(scaled: torch.Tensor, min_p: list[float]) -> torch.Tensor:
    if not any(min_p):
        return scaled
    floor_R1 = torch.tensor(min_p, dtype=torch.float64, device=scaled.device)[:, None].log()
    return scaled.masked_fill(scaled < floor_R1, float("-inf"))


def _keep(scaled_RC: torch.Tensor, values_RM: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """Which of the ordered candidates top-k and top-p keep."""
    vocab, device = scaled_RC.shape[1], scaled_RC.device
    k_R1 = torch.tensor([k or vocab for k in top_k], device=device)[:, None]
    p_R1 = torch.tensor(top_p, dtype=torch.float64, device=device)[:, None]
    keep_RM = torch.arange(values_RM.shape[1], device=device) < k_R1
    weights_RM = values_RM.exp() * keep_RM
    sums_RM = weights_RM.cumsum(dim=-1)
    total_R1 = sums_RM[:, -1:]
    if values_RM.shape[1] < vocab:
        total_R1 = torch.where(k_R1 < vocab, total_R1, scaled_RC.exp().sum(dim=-1, keepdim=True))
    before_RM = sums_RM - weights_RM
    keep_RM &= (before_RM < p_R1 * total_R1) | (p_R1 >= 1.0)
    keep_RM[:, 0] = True
    return keep_RM
