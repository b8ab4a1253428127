"""Who holds what: layers over pipeline stages, heads and columns over tensor ranks. Uneven is the general case.

Every split is ``shares(total, parts)``: contiguous, the first ``total % parts`` parts one larger (64 layers over 3
stages = 22/21/21, 16 heads over 3 ranks = 6/5/5).
"""

from itertools import pairwise

import msgspec

from hybserve.spec.model_spec import LayerSpec, ModelSpec


def shares(total: int, parts: int) -> list[tuple[int, int]]:
    """``parts`` contiguous half-open ranges that cover [0, total)."""
    base, extra = divmod(total, parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return list(pairwise(bounds))


class RankShare(msgspec.Struct, frozen=True):
    """The part of a model that one rank holds. All ranges are half-open over the whole model's indices.

    Query heads follow their kv head and value heads their key head, so groups never straddle ranks. With more ranks
    than kv heads, kv heads are replicated (``kv_heads`` ranges repeat) and the query heads of the group are split.
    """

    stage: int
    rank: int
    stages: int
    ranks: int
    layers: tuple[int, int]
    q_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    key_heads: tuple[int, int]
    value_heads: tuple[int, int]
    ffn: tuple[int, int]
    expert_ffn: tuple[int, int]
    shared_ffn: tuple[int, int]
    vocab: tuple[int, int]

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def layer_specs(self, spec: ModelSpec) -> tuple[LayerSpec, ...]:
        return spec.layers[self.layers[0] : self.layers[1]]


def width(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def split_ranks(spec: ModelSpec, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> tuple[RankShare, ...]:
    """The shares of all ranks, stage-major. Raises ValueError with the limit if a degree cannot divide the model."""
    attention, delta, moe = spec.attention, spec.gated_delta, spec.moe
    if pipeline_parallel > len(spec.layers):
        raise ValueError(f"pipeline_parallel {pipeline_parallel} exceeds the {len(spec.layers)} layers of the model")
    if attention is not None and tensor_parallel > attention.q_heads:
        raise ValueError(f"tensor_parallel {tensor_parallel} exceeds the {attention.q_heads} query heads")
    if delta is not None and tensor_parallel > delta.key_heads:
        raise ValueError(f"tensor_parallel {tensor_parallel} exceeds the {delta.key_heads} key heads")
    stages = shares(len(spec.layers), pipeline_parallel)
    q_heads, kv_heads = _attention_heads(spec, tensor_parallel)
    key_heads = shares(delta.key_heads if delta else 0, tensor_parallel)
    per_key = delta.value_heads // delta.key_heads if delta else 0
    return tuple(
        RankShare(
            stage=stage,
            rank=rank,
            stages=pipeline_parallel,
            ranks=tensor_parallel,
            layers=stages[stage],
            q_heads=q_heads[rank],
            kv_heads=kv_heads[rank],
            key_heads=key_heads[rank],
            value_heads=(key_heads[rank][0] * per_key, key_heads[rank][1] * per_key),
            ffn=shares(spec.ffn, tensor_parallel)[rank],
            expert_ffn=shares(moe.expert_ffn if moe else 0, tensor_parallel)[rank],
            shared_ffn=shares(moe.shared_ffn if moe else 0, tensor_parallel)[rank],
            vocab=shares(spec.vocab_size, tensor_parallel)[rank],
        )
        for stage in range(pipeline_parallel)
        for rank in range(tensor_parallel)
    )


def _attention_heads(spec: ModelSpec, ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    attention = spec.attention
    if attention is None:
        return [(0, 0)] * ranks, [(0, 0)] * ranks
    group = attention.q_heads // attention.kv_heads
    if ranks <= attention.kv_heads:
        kv_heads = shares(attention.kv_heads, ranks)
        return [(low * group, high * group) for low, high in kv_heads], kv_heads
    q_heads: list[tuple[int, int]] = []
    kv_heads = []
    for head, (low, high) in enumerate(shares(ranks, attention.kv_heads)):  # ranks that share kv head `head`
        if high - low > group:
            raise ValueError(
                f"tensor_parallel {ranks} leaves ranks without a query head ({group} per kv head); "
                f"lower it to {group * attention.kv_heads}"
            )
        q_heads += [(head * group + a, head * group + b) for a, b in shares(group, high - low)]
        kv_heads += [(head, head + 1)] * (high - low)
    return q_heads, kv_heads
