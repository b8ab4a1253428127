"""What a model is, as numbers: the only description of a model that planner, runner and scheduler read.

Made from config.json by ``from_hf``; no torch here. Letters as in DESIGN: H query heads, J kv heads, I key heads and
U value heads of recurrent layers, K key dim, V value dim, D model dim, W conv width, C vocabulary.
"""

from typing import Literal

import msgspec

Mixer = Literal["attention", "gated_delta"]
Mlp = Literal["dense", "moe"]


class LayerSpec(msgspec.Struct, frozen=True):
    mixer: Mixer
    mlp: Mlp


class AttentionSpec(msgspec.Struct, frozen=True):
    """Full attention with q/k RMS norm. ``output_gate``: q_proj also yields a gate per head, applied by sigmoid."""

    q_heads: int  # H
    kv_heads: int  # J
    head_dim: int
    rotary_dim: int  # the first rotary_dim of head_dim rotate (NeoX halves)
    rope_theta: float
    output_gate: bool = True
    bias: bool = False


class GatedDeltaSpec(msgspec.Struct, frozen=True):
    """Gated DeltaNet (arXiv 2412.06464): causal conv over cat(q, k, v), delta rule with decay, gated RMS norm."""

    key_heads: int  # I
    value_heads: int  # U, a multiple of I
    key_dim: int  # K
    value_dim: int  # V
    conv_width: int  # W

    @property
    def conv_channels(self) -> int:
        """Channels under the convolution: q, k and v sections, 2·I·K + U·V."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrix state of one layer, U·K·V."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def window_elements(self) -> int:
        """Elements of the conv window of one layer: the last W - 1 inputs of every channel."""
        return self.conv_channels * (self.conv_width - 1)


class MoeSpec(msgspec.Struct, frozen=True):
    experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int  # 0 = no shared expert
    norm_top_k: bool = True


class ModelSpec(msgspec.Struct, frozen=True):
    family: str  # "qwen3_5", "qwen3_5_moe", "qwen3_next"
    vocab_size: int  # C
    hidden: int  # D
    ffn: int  # dense MLP width, 0 if no layer is dense
    layers: tuple[LayerSpec, ...]
    attention: AttentionSpec | None  # None if no layer attends
    gated_delta: GatedDeltaSpec | None  # None if no layer is recurrent
    moe: MoeSpec | None
    norm_eps: float
    tied: bool  # lm_head shares the embedding
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"
    max_seq_len: int

    @property
    def attention_layers(self) -> int:
        return sum(layer.mixer == "attention" for layer in self.layers)

    @property
    def recurrent_layers(self) -> int:
        return len(self.layers) - self.attention_layers


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
