"""Bytes: of a page, of a slot, of a layer, of a step. Pure functions of numbers, exact, no torch.

Letters: T tokens of a step, N running sequences, D model dim, H query and J kv heads, d their dim, I key and U value
heads of recurrent layers, K key and V value dim, C vocabulary, F MLP width, E experts; all of one rank's share.
"""

import msgspec

from hybserve.core.units import MIB
from hybserve.plan.floors import pages_of
from hybserve.plan.result import ModelBytes
from hybserve.spec.model_spec import DTYPE_BYTES, LayerSpec, ModelSpec
from hybserve.spec.split import RankShare, width

#: Logits are made in slices of at most this many elements (at least one row), whatever a step samples or scores.
LOGITS_SLICE = 1 << 24
#: On CPU 16-bit weights are widened to fp32 for products of several rows, at most so many at a time.
WIDE_BLOCK = 1 << 22
#: Per logit beside the slice itself: log-probabilities of all; for sampled rows fp32 and altered copies, sorted values,
#: their int64 order, probabilities and running sums.
_SCORED_BYTES, _SAMPLED_BYTES = 8, 28
#: Tile of the chunked recurrent scan.
SCAN_TILE = 64

#: Seconds that a prefill chunk may keep running decodes waiting, and the floating-point operations a second of such
#: chunks on a GPU (an H200 reaches this with 16-bit weights).
DECODE_STALL, PREFILL_RATE = 0.026, 600e12
#: Seconds of prefill that may wait for admission before throughput comes before the decodes' pace.
PREFILL_BACKLOG = 1.0

CUBLAS_WORKSPACE = 32 * MIB
GRAPH_MEMORY = 256 * MIB
NCCL_BUFFERS = 256 * MIB


class Dtypes(msgspec.Struct, frozen=True):
    """Names as in DTYPE_BYTES. ``model``: weights and activations."""

    model: str
    kv: str
    state: str
    conv: str


class StepShape(msgspec.Struct, frozen=True):
    """The numbers that size one step."""

    max_running: int
    max_seq_len: int
    step_tokens: int
    prefill_chunk: int


class Transients(msgspec.Struct, frozen=True):
    """Bytes of one rank beside weights and pools, at the worst step."""

    activations: int
    attention: int  # gathered history and masks, where the backend has no paged kernel
    scan: int  # scratch of the recurrent scan
    logits: int
    penalties: int
    inputs: int  # block tables, token ids, positions; hidden states received and sent by a pipeline stage
    workspaces: int  # libraries, captured graphs, collectives
    staging: int = 0  # tiers

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


def model_bytes(spec: ModelSpec, dtypes: Dtypes) -> ModelBytes:
    """The whole model without any padding: one state, one layer's part of it, and the KV of one token."""
    delta, attention = spec.gated_delta, spec.attention
    per_layer = 0
    if delta is not None:
        per_layer = delta.matrix_elements * DTYPE_BYTES[dtypes.state] + delta.window_elements * DTYPE_BYTES[dtypes.conv]
    kv = 2 * attention.kv_heads * attention.head_dim * DTYPE_BYTES[dtypes.kv] if attention is not None else 0
    return ModelBytes(
        state_slot=per_layer * spec.recurrent_layers,
        state_slot_per_layer=per_layer,
        kv_per_token=kv * spec.attention_layers,
    )


def matrix_flops(spec: ModelSpec) -> int:
    """Floating-point operations of one token in the matrix products of all layers: 2 for every weight it meets."""
    hidden, weights = spec.hidden, 0
    for layer in spec.layers:
        if layer.mixer == "attention":
            assert spec.attention is not None
            query = spec.attention.q_heads * spec.attention.head_dim
            key = spec.attention.kv_heads * spec.attention.head_dim
            weights += hidden * ((3 if spec.attention.output_gate else 2) * query + 2 * key)
        else:
            assert spec.gated_delta is not None
            delta = spec.gated_delta
            keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
            weights += hidden * (2 * keys + 3 * values + 2 * delta.value_heads)
        if layer.mlp == "dense":
            weights += 3 * hidden * spec.ffn
        else:
            assert spec.moe is not None
            moe = spec.moe
            weights += hidden * (moe.experts + 3 * moe.top_k * moe.expert_ffn + 3 * moe.shared_ffn)
    return 2 * weights


def checkpoint_cost_tokens(bytes_: ModelBytes, page_size: int) -> int:
    """Tokens of KV, rounded up to a page, that cost what one checkpoint costs; one page when KV costs nothing."""
    if bytes_.kv_per_token == 0 or bytes_.state_slot == 0:
        return page_size
    tokens = -(-bytes_.state_slot // bytes_.kv_per_token)
    return pages_of(tokens, page_size) * page_size


def transients(
    spec: ModelSpec, share: RankShare, shape: StepShape, dtypes: Dtypes, page_size: int, cuda: bool
) -> Transients:
    """The worst step of a rank: ``step_tokens`` tokens, ``max_running`` rows, the longest history.
    On CPU activations are counted in fp32, because most of the ops compute in it."""
    element = DTYPE_BYTES[dtypes.model] if cuda else 4
    layers = share.layer_specs(spec)
    attends = any(layer.mixer == "attention" for layer in layers)
    recurs = any(layer.mixer == "gated_delta" for layer in layers)
    rows, tokens = shape.max_running, shape.step_tokens
    vocab = width(share.vocab)
    several = share.stages * share.ranks > 1
    between = 2 * tokens * spec.hidden * element if share.stages > 1 else 0
    return Transients(
        activations=_activations(spec, share, tokens, element, cuda) + (0 if cuda else _widened(spec, share, dtypes)),
        attention=0 if cuda or not attends else _attention(spec, share, shape, dtypes, page_size),
        scan=_scan(spec, share, shape, dtypes, element, cuda) if recurs else 0,
        logits=_logits(vocab, rows, tokens, element) if share.last else 0,
        penalties=rows * (vocab * 4 if cuda else min(vocab, shape.max_seq_len) * 24) if share.last else 0,
        inputs=rows * pages_of(shape.max_seq_len, page_size) * (4 if cuda else 8) + tokens * 4 * 8 + between,
        workspaces=(CUBLAS_WORKSPACE + GRAPH_MEMORY + (NCCL_BUFFERS if several else 0)) if cuda else 0,
    )


def _logits(vocab: int, rows: int, tokens: int, element: int) -> int:
    most = max(vocab, LOGITS_SLICE)
    return min(tokens * vocab, most) * (element + _SCORED_BYTES) + min(rows * vocab, most) * _SAMPLED_BYTES


def _widened(spec: ModelSpec, share: RankShare, dtypes: Dtypes) -> int:
    """CPU only: a block of a 16-bit weight in fp32, of one that is no smaller than the largest."""
    widest = max(width(share.vocab), *(_inside(spec, share, layer, cuda=False) for layer in share.layer_specs(spec)))
    return min(WIDE_BLOCK, spec.hidden * widest) * 4 if dtypes.model != "float32" else 0


def _activations(spec: ModelSpec, share: RankShare, tokens: int, element: int, cuda: bool) -> int:
    """Residual, its norm (in fp32 while it is computed) and a branch's output, and the widest layer's inside."""
    widest = max((_inside(spec, share, layer, cuda) for layer in share.layer_specs(spec)), default=0)
    return tokens * (spec.hidden * (3 * element + 4) + widest * element)


def _inside(spec: ModelSpec, share: RankShare, layer: LayerSpec, cuda: bool) -> int:
    """Elements per token inside the wider half of a layer."""
    mixer = _attention_width(spec, share) if layer.mixer == "attention" else _delta_width(spec, share)
    return max(mixer, 3 * width(share.ffn) if layer.mlp == "dense" else _moe_width(spec, share, cuda))


def _attention_width(spec: ModelSpec, share: RankShare) -> int:
    """Elements per token: fused projection, rotated q and k, output."""
    assert spec.attention is not None
    query, key = width(share.q_heads) * spec.attention.head_dim, width(share.kv_heads) * spec.attention.head_dim
    return (4 if spec.attention.output_gate else 3) * query + 3 * key


def _delta_width(spec: ModelSpec, share: RankShare) -> int:
    """Elements per token: projection (q, k, v, z, b, a), the convolution's input, sum and output, unit q and k, v, the
    scan's output and its gated norm."""
    assert spec.gated_delta is not None
    delta, heads = spec.gated_delta, width(share.value_heads)
    keys, values = width(share.key_heads) * delta.key_dim, heads * delta.value_dim
    return (2 * keys + 2 * values + 2 * heads) + 3 * (2 * keys + values) + 2 * keys + 3 * values


def _moe_width(spec: ModelSpec, share: RankShare, cuda: bool) -> int:
    """Elements per token: router scores and probabilities, the shared expert, and the inside and output of every
    chosen expert at once; on CPU experts run one by one, and at worst one of them gets every token."""
    assert spec.moe is not None
    moe, inside = spec.moe, 3 * width(share.expert_ffn)
    chosen = moe.top_k * (inside + spec.hidden) if cuda else inside + 2 * spec.hidden + 6 * moe.top_k
    return 2 * moe.experts + chosen + 3 * width(share.shared_ffn) + spec.hidden


def _attention(spec: ModelSpec, share: RankShare, shape: StepShape, dtypes: Dtypes, page_size: int) -> int:
    """CPU only. Rows gather their history one after another, so it does not matter how many there are or which pages
    they share. Decode reads it in fp32; prefill in the model's dtype, with a mask. The masks of all rows of the step
    are made together and kept for every layer. The larger of both, as decode and prefill follow one another."""
    assert spec.attention is not None
    heads, kv_heads, dim = width(share.q_heads), width(share.kv_heads), spec.attention.head_dim
    row_pages = pages_of(shape.max_seq_len, page_size)
    kv, cell = DTYPE_BYTES[dtypes.kv], kv_heads * page_size * dim
    per_page = 2 * cell * (4 + (kv if kv < 4 else 0)) + heads * page_size * 2 * 4
    decode = row_pages * per_page + shape.max_running * heads * dim * 3 * 4
    history = row_pages * cell * 2 * (kv + 2 * DTYPE_BYTES[dtypes.model])
    masks = (shape.step_tokens + shape.prefill_chunk * 4) * shape.max_seq_len
    return max(decode, history) + masks


def _scan(spec: ModelSpec, share: RankShare, shape: StepShape, dtypes: Dtypes, element: int, cuda: bool) -> int:
    """GPU: the state before every tile, the tile's inverse and its w and u. CPU: of every decoding row queries, keys,
    what is read and written, and its state where that is not kept in fp32; for one row's chunk decay, system and scores
    of every tile, queries, keys, both sides of the triangular solve and the output."""
    assert spec.gated_delta is not None
    delta, heads = spec.gated_delta, width(share.value_heads)
    state = heads * delta.key_dim * delta.value_dim
    if cuda:
        tiles = 2 * pages_of(shape.step_tokens, SCAN_TILE)
        per_token = heads * (2 * delta.key_dim + 2 * delta.value_dim)
        return tiles * state * element + shape.step_tokens * (per_token * element + heads * SCAN_TILE * 4)
    widened = state if dtypes.state != "float32" else 0
    per_row = heads * (5 * delta.key_dim + 5 * delta.value_dim) + widened
    per_token = heads * (6 * delta.key_dim + 3 * delta.value_dim + 5 * SCAN_TILE)
    return (shape.max_running * per_row + shape.prefill_chunk * per_token) * 4
