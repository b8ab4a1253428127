"""Every parameter of a model: name, shape, how ranks share it, and which checkpoint tensors fill it.

One table serves the planner (bytes), the model (what to allocate) and the loader (what to read). A parameter is cut
along one axis into *sections* (query rows, key rows, …), a section into *units* (heads, columns): a rank holds a
contiguous range of units of every section, so each section is sharded on its own. A *source* says where the units of
one section lie in a checkpoint tensor: unit u at rows [offset + u·stride, … + rows). That covers separate projections,
fused ones, and Qwen3-Next's projections that interleave q, k, v and z per key head.

Letters: H query heads, J kv heads, d head dim, I key heads, U value heads, K key dim, V value dim, W conv width,
D model dim, C vocabulary, F dense, Fe expert and Fs shared-expert width, E experts.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from hybserve.core.errors import ModelError
from hybserve.spec.json_file import one_line
from hybserve.spec.model_spec import DTYPE_BYTES, AttentionSpec, GatedDeltaSpec, ModelSpec, MoeSpec
from hybserve.spec.safetensors import TensorInfo
from hybserve.spec.split import RankShare, width

#: Which range of a RankShare cuts the units of a section; "whole" is not cut. Value heads follow their key head
#: (RankShare says so), so all sections of a recurrent layer count their units in key heads.
Split = Literal["whole", "q_heads", "kv_heads", "key_heads", "ffn", "expert_ffn", "shared_ffn", "vocab"]


class Source(msgspec.Struct, frozen=True, gc=False):
    """Where the units of one section lie in a checkpoint tensor, along the parameter's axis.

    ``tensor`` is the text-only name. With ``{e}`` in it there is one tensor per expert, each without the leading
    expert dimension of the parameter. ``shape`` is the checkpoint's own.
    """

    tensor: str
    shape: tuple[int, ...]
    offset: int
    stride: int


class Section(msgspec.Struct, frozen=True, gc=False):
    """``units`` units of ``rows`` rows each; ``sources`` are alternatives, one for each layout of the parameter."""

    split: Split
    units: int
    rows: int
    sources: tuple[Source, ...]

    def range(self, share: RankShare) -> tuple[int, int]:
        """The half-open range of units that a rank holds."""
        if self.split == "whole":
            return 0, self.units
        span: tuple[int, int] = getattr(share, self.split)
        return span


class ParamSpec(msgspec.Struct, frozen=True, gc=False):
    name: str
    shape: tuple[int, ...]  # of the whole model
    dtype: Literal["model", "float32"]  # "model": the dtype that the model is served in
    axis: int  # the dimension that sections cut
    sections: tuple[Section, ...]

    def local_shape(self, share: RankShare) -> tuple[int, ...]:
        """The shape on one rank."""
        rows = sum(width(section.range(share)) * section.rows for section in self.sections)
        return *self.shape[: self.axis], rows, *self.shape[self.axis + 1 :]

    @property
    def layouts(self) -> int:
        """In how many ways a checkpoint may store this parameter."""
        return len(self.sections[0].sources)

    def tensors(self, layout: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every checkpoint tensor that the parameter needs in one layout."""
        for source in dict.fromkeys(section.sources[layout] for section in self.sections):
            for expert in self.experts_of(source):
                yield tensor_name(source, expert), source.shape

    def experts_of(self, source: Source) -> list[int | None]:
        """Indices into the leading dimension that ``source`` fills one by one; ``[None]`` if it fills all at once."""
        return list(range(self.shape[0])) if "{e}" in source.tensor else [None]


def tensor_name(source: Source, expert: int | None) -> str:
    return source.tensor if expert is None else source.tensor.replace("{e}", str(expert))


def inventory(spec: ModelSpec) -> tuple[ParamSpec, ...]:
    """All parameters of the whole model, embedding first, in layer order."""
    wide = (spec.vocab_size, spec.hidden)
    params = [_rows("embed.weight", "model.embed_tokens.weight", "vocab", wide)]
    for index in range(len(spec.layers)):
        params += layer_params(spec, index)
    params.append(_whole("norm.weight", "model.norm.weight", (spec.hidden,)))
    if not spec.tied:
        params.append(_rows("lm_head.weight", "lm_head.weight", "vocab", wide))
    return tuple(params)


def params_of(spec: ModelSpec, share: RankShare) -> tuple[ParamSpec, ...]:
    """The parameters that one rank holds: its stage's layers, the embedding on the first stage, norm and head on the
    last; with a tied head the last stage holds the embedding too."""
    outer = {"embed.weight"} if share.first or (share.last and spec.tied) else set()
    if share.last:
        outer |= {"norm.weight", "lm_head.weight"}
    low, high = share.layers
    layers = tuple(f"layers.{index}." for index in range(low, high))
    return tuple(param for param in inventory(spec) if param.name in outer or param.name.startswith(layers))


def weight_bytes(spec: ModelSpec, share: RankShare, dtype: str) -> int:
    """Bytes of all parameters of one rank when the model is served in ``dtype``."""
    return sum(
        math.prod(param.local_shape(share)) * DTYPE_BYTES[dtype if param.dtype == "model" else param.dtype]
        for param in params_of(spec, share)
    )


def layer_params(spec: ModelSpec, index: int) -> list[ParamSpec]:
    """The parameters of layer ``index``."""
    layer, ours, theirs = spec.layers[index], f"layers.{index}", f"model.layers.{index}"
    params = [
        _whole(f"{ours}.input_norm.weight", f"{theirs}.input_layernorm.weight", (spec.hidden,)),
        _whole(f"{ours}.post_norm.weight", f"{theirs}.post_attention_layernorm.weight", (spec.hidden,)),
    ]
    if layer.mixer == "attention" and spec.attention is not None:
        params += _attention(f"{ours}.attention", f"{theirs}.self_attn", spec.attention, spec.hidden)
    if layer.mixer == "gated_delta" and spec.gated_delta is not None:
        params += _gated_delta(f"{ours}.gated_delta", f"{theirs}.linear_attn", spec.gated_delta, spec.hidden)
    if layer.mlp == "dense":
        params += _mlp(f"{ours}.mlp", f"{theirs}.mlp", "ffn", spec.ffn, spec.hidden)
    if layer.mlp == "moe" and spec.moe is not None:
        params += _moe(f"{ours}.moe", f"{theirs}.mlp", spec.moe, spec.hidden)
    return params


def _attention(ours: str, theirs: str, attention: AttentionSpec, hidden: int) -> list[ParamSpec]:
    head, pairs = attention.head_dim, attention.kv_heads * attention.head_dim
    query = head * (2 if attention.output_gate else 1)  # per head: query, then its gate
    parts: tuple[tuple[str, Split, int, int], ...] = (
        ("q_proj", "q_heads", attention.q_heads, query),
        ("k_proj", "kv_heads", attention.kv_heads, head),
        ("v_proj", "kv_heads", attention.kv_heads, head),
    )

    def fused(kind: str, tail: tuple[int, ...]) -> ParamSpec:
        sections = tuple(
            Section(split, units, rows, (Source(f"{theirs}.{name}.{kind}", (units * rows, *tail), 0, rows),))
            for name, split, units, rows in parts
        )
        rows = attention.q_heads * query + 2 * pairs
        return ParamSpec(f"{ours}.qkv.{kind}", (rows, *tail), "model", 0, sections)

    params = [
        fused("weight", (hidden,)),
        _whole(f"{ours}.q_norm.weight", f"{theirs}.q_norm.weight", (head,)),
        _whole(f"{ours}.k_norm.weight", f"{theirs}.k_norm.weight", (head,)),
        _columns(f"{ours}.o.weight", f"{theirs}.o_proj.weight", "q_heads", hidden, attention.q_heads, head),
    ]
    if attention.bias:
        params += [fused("bias", ()), _whole(f"{ours}.o.bias", f"{theirs}.o_proj.bias", (hidden,))]
    return params


def _gated_delta(ours: str, theirs: str, delta: GatedDeltaSpec, hidden: int) -> list[ParamSpec]:
    heads, per_key = delta.key_heads, delta.value_heads // delta.key_heads
    key, value = delta.key_dim, per_key * delta.value_dim  # rows of one key head's group
    channels = delta.conv_channels
    conv = f"{theirs}.conv1d.weight"
    conv_shape = (channels, 1, delta.conv_width)

    def heads_of(rows: int, *sources: Source) -> Section:
        return Section("key_heads", heads, rows, sources)

    def per_head(name: str, dtype: Literal["model", "float32"]) -> ParamSpec:
        section = heads_of(per_key, Source(f"{theirs}.{name}", (delta.value_heads,), 0, per_key))
        return ParamSpec(f"{ours}.{name}", (delta.value_heads,), dtype, 0, (section,))

    return [
        _delta_projection(ours, theirs, delta, hidden),
        ParamSpec(
            f"{ours}.conv.weight",
            (channels, delta.conv_width),
            "model",
            0,
            (
                heads_of(key, Source(conv, conv_shape, 0, key)),
                heads_of(key, Source(conv, conv_shape, heads * key, key)),
                heads_of(value, Source(conv, conv_shape, 2 * heads * key, value)),
            ),
        ),
        per_head("A_log", "float32"),
        per_head("dt_bias", "float32"),
        _whole(f"{ours}.norm.weight", f"{theirs}.norm.weight", (delta.value_dim,)),
        _columns(f"{ours}.out.weight", f"{theirs}.out_proj.weight", "key_heads", hidden, heads, value),
    ]


def _delta_projection(ours: str, theirs: str, delta: GatedDeltaSpec, hidden: int) -> ParamSpec:
    """q, k, v, z, b, a in this order, from four projections (Qwen3.5) or two interleaved ones (Qwen3-Next)."""
    heads, per_key = delta.key_heads, delta.value_heads // delta.key_heads
    key, value = delta.key_dim, per_key * delta.value_dim
    group, pair = 2 * key + 2 * value, 2 * per_key  # one key head's rows in the interleaved projections
    qkv = (delta.conv_channels, hidden)
    qkvz, ba = (heads * group, hidden), (heads * pair, hidden)
    z, scalars = (heads * value, hidden), (delta.value_heads, hidden)

    def section(rows: int, separate: Source, interleaved: Source) -> Section:
        return Section("key_heads", heads, rows, (separate, interleaved))

    def separate(name: str, shape: tuple[int, int], offset: int, rows: int) -> Source:
        return Source(f"{theirs}.in_proj_{name}.weight", shape, offset, rows)

    def interleaved(name: str, shape: tuple[int, int], offset: int, stride: int) -> Source:
        return Source(f"{theirs}.in_proj_{name}.weight", shape, offset, stride)

    sections = (
        section(key, separate("qkv", qkv, 0, key), interleaved("qkvz", qkvz, 0, group)),
        section(key, separate("qkv", qkv, heads * key, key), interleaved("qkvz", qkvz, key, group)),
        section(value, separate("qkv", qkv, 2 * heads * key, value), interleaved("qkvz", qkvz, 2 * key, group)),
        section(value, separate("z", z, 0, value), interleaved("qkvz", qkvz, 2 * key + value, group)),
        section(per_key, separate("b", scalars, 0, per_key), interleaved("ba", ba, 0, pair)),
        section(per_key, separate("a", scalars, 0, per_key), interleaved("ba", ba, per_key, pair)),
    )
    rows = heads * (group + pair)
    return ParamSpec(f"{ours}.in_proj.weight", (rows, hidden), "model", 0, sections)


def _mlp(ours: str, theirs: str, split: Split, ffn: int, hidden: int) -> list[ParamSpec]:
    sections = tuple(
        Section(split, ffn, 1, (Source(f"{theirs}.{name}.weight", (ffn, hidden), 0, 1),))
        for name in ("gate_proj", "up_proj")
    )
    return [
        ParamSpec(f"{ours}.gate_up.weight", (2 * ffn, hidden), "model", 0, sections),
        _columns(f"{ours}.down.weight", f"{theirs}.down_proj.weight", split, hidden, ffn, 1),
    ]


def _moe(ours: str, theirs: str, moe: MoeSpec, hidden: int) -> list[ParamSpec]:
    experts, ffn = moe.experts, moe.expert_ffn
    fused = (experts, 2 * ffn, hidden)
    gate_up = tuple(
        Section(
            "expert_ffn",
            ffn,
            1,
            (
                Source(f"{theirs}.experts.gate_up_proj", fused, offset, 1),
                Source(f"{theirs}.experts.{{e}}.{name}.weight", (ffn, hidden), 0, 1),
            ),
        )
        for name, offset in (("gate_proj", 0), ("up_proj", ffn))
    )
    down = Section(
        "expert_ffn",
        ffn,
        1,
        (
            Source(f"{theirs}.experts.down_proj", (experts, hidden, ffn), 0, 1),
            Source(f"{theirs}.experts.{{e}}.down_proj.weight", (hidden, ffn), 0, 1),
        ),
    )
    params = [
        _whole(f"{ours}.router.weight", f"{theirs}.gate.weight", (experts, hidden)),
        ParamSpec(f"{ours}.gate_up.weight", fused, "model", 1, gate_up),
        ParamSpec(f"{ours}.down.weight", (experts, hidden, ffn), "model", 2, (down,)),
    ]
    if moe.shared_ffn:
        params += _mlp(f"{ours}.shared", f"{theirs}.shared_expert", "shared_ffn", moe.shared_ffn, hidden)
        params.append(_whole(f"{ours}.shared_gate.weight", f"{theirs}.shared_expert_gate.weight", (1, hidden)))
    return params


def _whole(name: str, tensor: str, shape: tuple[int, ...]) -> ParamSpec:
    """A parameter that every rank holds whole."""
    return ParamSpec(name, shape, "model", 0, (Section("whole", shape[0], 1, (Source(tensor, shape, 0, 1),)),))


def _rows(name: str, tensor: str, split: Split, shape: tuple[int, int]) -> ParamSpec:
    """A matrix cut along its rows."""
    return ParamSpec(name, shape, "model", 0, (Section(split, shape[0], 1, (Source(tensor, shape, 0, 1),)),))


def _columns(name: str, tensor: str, split: Split, rows: int, units: int, unit: int) -> ParamSpec:
    """A matrix cut along its columns, ``units`` units of ``unit`` columns."""
    shape = (rows, units * unit)
    return ParamSpec(name, shape, "model", 1, (Section(split, units, unit, (Source(tensor, shape, 0, unit),)),))


# ---------------------------------------------------------------------------------------------------------------------
# From the names of a checkpoint to the inventory


#: Prefixes of tensors that are left unread, by family: the vision model and the multi-token-prediction head.
SKIPPED: Mapping[str, tuple[str, ...]] = {
    "qwen3_5": ("model.visual.", "visual.", "mtp."),
    "qwen3_5_moe": ("model.visual.", "visual.", "mtp."),
    "qwen3_next": ("mtp.",),
}
#: Constant tables that some exporters write out; they follow from the configuration.
_SKIPPED_SUFFIX = ".rotary_emb.inv_freq"
_MULTIMODAL, _TEXT = "model.language_model.", "model."
_FLOATS = ("F32", "BF16", "F16")
#: Most names that one error lists.
_LISTED = 8


class Binding(msgspec.Struct, frozen=True):
    """The checkpoint's answer to the inventory."""

    tensors: Mapping[str, TensorInfo]  # by text-only name
    layouts: Mapping[str, int]  # parameter name -> which of its layouts the checkpoint uses
    #: A tied checkpoint may store its head as well; then this is it, and it must equal the embedding.
    tied_head: TensorInfo | None


def bind(spec: ModelSpec, headers: Mapping[str, TensorInfo]) -> Binding:
    """Match a checkpoint's tensors with the inventory of the whole model.

    Raises ModelError that lists names unless every parameter is filled, every tensor that is not on the family's skip
    list is consumed exactly once, and every shape and dtype is as the configuration says.
    """
    tensors = _text_names(spec, headers)
    tied_head = tensors.pop("lm_head.weight", None) if spec.tied else None
    layouts: dict[str, int] = {}
    missing: list[str] = []
    consumed: set[str] = set()
    for param in inventory(spec):
        wanted = [dict(param.tensors(layout)) for layout in range(param.layouts)]
        layout = max(range(len(wanted)), key=lambda choice: sum(name in tensors for name in wanted[choice]))
        missing += [name for name in wanted[layout] if name not in tensors]
        layouts[param.name] = layout
        consumed.update(wanted[layout])
        for name, shape in wanted[layout].items():
            if name in tensors:
                _check(tensors[name], shape)
    if missing:
        raise ModelError(f"the weights lack {_listed(missing)}")
    unknown = [tensors[name].name for name in tensors if name not in consumed]
    if unknown:
        raise ModelError(f"the weights hold {_listed(unknown)}, which this model does not have")
    if tied_head is not None:
        _check(tied_head, (spec.vocab_size, spec.hidden))
    return Binding(tensors, layouts, tied_head)


def _text_names(spec: ModelSpec, headers: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors that must be consumed, under their text-only names."""
    tensors: dict[str, TensorInfo] = {}
    for name, info in headers.items():
        if name.startswith(SKIPPED[spec.family]) or name.endswith(_SKIPPED_SUFFIX):
            continue
        text_name = _TEXT + name.removeprefix(_MULTIMODAL) if name.startswith(_MULTIMODAL) else name
        if text_name in tensors:
            raise ModelError(f"{info.file.name}: {one_line(name)} and {tensors[text_name].name} are the same parameter")
        tensors[text_name] = info
    return tensors


def _check(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.dtype not in _FLOATS:
        raise ModelError(
            f"{info.file.name}: tensor {info.name} is {info.dtype}; quantised weights are not supported, only "
            "float32, bfloat16 and float16"
        )
    if info.shape != shape:
        raise ModelError(
            f"{info.file.name}: tensor {info.name} has shape {list(info.shape)}, "
            f"by config.json it must be {list(shape)}"
        )


def _listed(names: list[str]) -> str:
    text = ", ".join(one_line(name) for name in sorted(names)[:_LISTED])
    return text if len(names) <= _LISTED else f"{text} and {len(names) - _LISTED} more"
