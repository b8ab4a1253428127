"""Synthetic checkpoints: tiny random models of every supported family, saved under the names of the public ones.

``make_checkpoint(tmp_path, "dense")`` writes a whole model directory (config, weights, tokenizer files) that both
hybserve and transformers load; ``load_reference(path)`` is the transformers model of it, the oracle. Weights are
random but not degenerate: logits vary, norms sit around their centre, decays span short and long memories.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.random_model import END_OF_TEXT, IM_END, write_tokenizer_files

Tensors = dict[str, torch.Tensor]

_BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "eos_token_id": IM_END,
    "pad_token_id": END_OF_TEXT,
}
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def _rope(partial: float, theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial}


#: name -> (model type as config.json says it, changes to the base configuration)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3_5_text", {}),
    "tied": ("qwen3_5_text", {"tie_word_embeddings": True, "num_hidden_layers": 5, "full_attention_interval": 2}),
    "dims": ("qwen3_5_text", {"linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 24}),
    "odd": (
        "qwen3_5_text",
        {
            "vocab_size": 301,
            "hidden_size": 44,
            "intermediate_size": 52,
            "num_hidden_layers": 5,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "quarter_rotary": ("qwen3_5_text", {"head_dim": 32, "rope_parameters": _rope(0.25, 1e6), "hidden_size": 48}),
    "full_rotary": (
        "qwen3_5_text",
        {
            "rope_parameters": _rope(1.0),
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    "conv3": ("qwen3_5_text", {"linear_conv_kernel_dim": 3, "linear_num_key_heads": 4, "hidden_size": 32}),
    "bias": ("qwen3_5_text", {"attention_bias": True, "full_attention_interval": 2}),
    "no_attention": ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3}),
    "no_recurrent": ("qwen3_5_text", {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3}),
    "uneven": (
        "qwen3_5_text",
        {
            "vocab_size": 311,
            "hidden_size": 60,
            "intermediate_size": 70,
            "num_hidden_layers": 8,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "head_dim": 12,
            "linear_num_key_heads": 5,
            "linear_num_value_heads": 10,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
    "moe": ("qwen3_5_moe_text", _MOE),
    "next_moe": ("qwen3_next", _MOE | {"linear_value_head_dim": 8}),
    "next_mixed": (
        "qwen3_next",
        _MOE | {"mlp_only_layers": [3], "decoder_sparse_step": 2, "num_hidden_layers": 6, "norm_topk_prob": False},
    ),
    "next_dense": ("qwen3_next", _MOE | {"num_experts": 0, "linear_num_value_heads": 8, "tie_word_embeddings": True}),
    "multimodal": ("qwen3_5", {}),
    "multimodal_tied": ("qwen3_5", {"tie_word_embeddings": True}),
    "multimodal_moe": ("qwen3_5_moe", _MOE | {"num_hidden_layers": 3, "full_attention_interval": 3}),
}

_CLASSES = {
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}


def make_checkpoint(
    directory: Path,
    shape: str = "dense",
    *,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 1,
    per_expert: bool | None = None,
    tokenizer: bool = True,
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write ``directory / shape`` and return it.

    ``shards`` > 1 writes an index beside that many files. ``per_expert`` writes one tensor per expert instead of the
    fused ones (default: as the public checkpoints of the family do). ``generation`` is generation_config.json.
    ``overrides`` change keys of the (text) configuration.
    """
    model_type, changes = SHAPES[shape]
    family = model_type.removesuffix("_text")
    config_class, model_class = _CLASSES[family]
    config = config_class(**{**_BASE, **changes, **overrides})
    config.dtype = dtype
    torch.manual_seed(seed)
    model = model_class(config).to(getattr(torch, dtype))
    randomise(model, seed)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if family == "qwen3_next" if per_expert is None else per_expert:
        tensors = _split_experts(tensors)
    tensors |= _speculation_head(config, getattr(torch, dtype))
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        tensors = _multimodal_names(tensors)

    target = Path(directory) / shape
    target.mkdir(parents=True)
    _write_config(target, config, model_type, model_class.__name__)
    _write_weights(target, tensors, shards)
    if tokenizer:
        write_tokenizer_files(target)
    generation = {"eos_token_id": [IM_END, END_OF_TEXT]} if generation is None else generation
    (target / "generation_config.json").write_text(json.dumps(generation))
    return target


def load_reference(path: Path) -> Any:
    """The transformers model of a checkpoint directory: fp32, eager attention, evaluation mode.

    Without any attention layer it runs without its cache, which can not count tokens then.
    """
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if "full_attention" not in model.config.layer_types:
        model.config.use_cache = False
        model.generation_config.use_cache = False
    return model.eval()


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter in place, in a fixed order, so that a shape and a seed always give the same weights."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=random)
        if name.endswith("A_log"):
            values = torch.empty(parameter.shape).uniform_(0.1, 16, generator=random).log()
        elif name.endswith("dt_bias"):
            steps = torch.empty(parameter.shape).uniform_(-6.9, -2.3, generator=random).exp()
            values = steps + torch.log(-torch.expm1(-steps))
        elif name.endswith("linear_attn.norm.weight"):
            values = 1 + 0.2 * values
        elif "norm" in name:
            values = 0.2 * values
        elif name.endswith("conv1d.weight"):
            values = 0.5 * values
        elif name.endswith(("embed_tokens.weight", "mlp.gate.weight")):
            values = 0.4 * values
        else:
            values = 0.2 * values
        parameter.copy_(values)


def _split_experts(tensors: Tensors) -> Tensors:
    """One gate, up and down projection per expert, as the older public MoE checkpoints store them."""
    split: Tensors = {}
    for name, tensor in tensors.items():
        prefix = name.rpartition(".")[0]
        if name.endswith("mlp.experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                split[f"{prefix}.{expert}.gate_proj.weight"] = gate.contiguous()
                split[f"{prefix}.{expert}.up_proj.weight"] = up.contiguous()
        elif name.endswith("mlp.experts.down_proj"):
            split |= {f"{prefix}.{expert}.down_proj.weight": down.contiguous() for expert, down in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


def _multimodal_names(tensors: Tensors) -> Tensors:
    """The names of a vision-language checkpoint, with a few vision tensors that a text server has to skip."""
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    renamed["model.visual.patch_embed.proj.weight"] = torch.randn(16, 3, 2, 4, 4)
    renamed["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(48, 16)
    return renamed


def _speculation_head(config: Any, dtype: torch.dtype) -> Tensors:
    """A few tensors of the multi-token-prediction head that public checkpoints carry."""
    hidden = config.hidden_size
    return {
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden).to(dtype),
        "mtp.norm.weight": torch.randn(hidden).to(dtype),
        "mtp.layers.0.self_attn.k_proj.weight": torch.randn(8, hidden).to(dtype),
    }


def _write_config(target: Path, config: Any, model_type: str, architecture: str) -> None:
    text = config.to_dict()
    text["architectures"] = [architecture]
    content = text
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        content = {
            "architectures": [architecture.replace("CausalLM", "ConditionalGeneration")],
            "model_type": model_type,
            "text_config": text,
            "vision_config": _VISION | {"model_type": f"{model_type}_vision"},
            "tie_word_embeddings": config.tie_word_embeddings,
            "dtype": text["dtype"],
        }
    (target / "config.json").write_text(json.dumps(content, indent=2))


def _write_weights(target: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
