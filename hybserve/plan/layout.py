"""Where every byte of one KV page and of one state slot lies, per rank. Planner and runner use these same figures.

A page (pool: page-major) is one run: ``[layer][k, v][kv head][token][head_dim]``. A slot (pool: slot-major) is one
run: per recurrent layer the matrix state ``[value head][K][V]`` and then the conv window ``[q heads·K, k heads·K,
v heads·V][W - 1]`` (channel-major, so that every head's part is one cell). Layer parts start at multiples of 16 bytes,
pages and slots at multiples of 256; the public shapes need no padding at all.
"""

import msgspec

from hybserve.spec.model_spec import DTYPE_BYTES, ModelSpec
from hybserve.spec.split import RankShare, width

PART_ALIGN = 16
RUN_ALIGN = 256


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


class PageLayout(msgspec.Struct, frozen=True):
    layers: int  # attention layers of this rank
    kv_heads: int
    page_size: int
    head_dim: int
    dtype: str
    layer_bytes: int  # one layer's k and v, and the distance between layers
    page_bytes: int  # distance between pages; 0 on a rank without attention


class SlotLayout(msgspec.Struct, frozen=True):
    layers: int  # recurrent layers of this rank
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int  # W - 1
    state_dtype: str
    conv_dtype: str
    matrix_bytes: int  # one layer's matrix state without padding
    window_bytes: int  # one layer's conv window without padding
    window_offset: int  # of the window inside its layer part
    layer_bytes: int  # distance between layer parts
    slot_bytes: int  # distance between slots; 0 on a rank without recurrent layers

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def page_layout(spec: ModelSpec, share: RankShare, page_size: int, kv_dtype: str) -> PageLayout:
    layers = sum(layer.mixer == "attention" for layer in share.layer_specs(spec))
    if spec.attention is None or layers == 0:
        return PageLayout(0, 0, page_size, 0, kv_dtype, 0, 0)
    heads, dim = width(share.kv_heads), spec.attention.head_dim
    layer_bytes = _up(2 * heads * page_size * dim * DTYPE_BYTES[kv_dtype], PART_ALIGN)
    page_bytes = _up(layers * layer_bytes, RUN_ALIGN)
    return PageLayout(layers, heads, page_size, dim, kv_dtype, layer_bytes, page_bytes)


def slot_layout(spec: ModelSpec, share: RankShare, state_dtype: str, conv_dtype: str) -> SlotLayout:
    layers = sum(layer.mixer == "gated_delta" for layer in share.layer_specs(spec))
    delta = spec.gated_delta
    if delta is None or layers == 0:
        return SlotLayout(0, 0, 0, 0, 0, 0, state_dtype, conv_dtype, 0, 0, 0, 0, 0)
    key_heads, value_heads, window = width(share.key_heads), width(share.value_heads), delta.conv_width - 1
    channels = 2 * key_heads * delta.key_dim + value_heads * delta.value_dim
    matrix_bytes = value_heads * delta.key_dim * delta.value_dim * DTYPE_BYTES[state_dtype]
    window_bytes = channels * window * DTYPE_BYTES[conv_dtype]
    window_offset = _up(matrix_bytes, PART_ALIGN)
    layer_bytes = _up(window_offset + window_bytes, PART_ALIGN)
    return SlotLayout(
        layers=layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        window=window,
        state_dtype=state_dtype,
        conv_dtype=conv_dtype,
        matrix_bytes=matrix_bytes,
        window_bytes=window_bytes,
        window_offset=window_offset,
        layer_bytes=layer_bytes,
        slot_bytes=_up(layers * layer_bytes, RUN_ALIGN),
    )
