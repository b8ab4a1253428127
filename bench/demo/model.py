"""The network of a ``qwen3_5_text`` checkpoint in plain torch, for training: public parameter names, packed rows.

A row holds whole documents one after another. Nothing passes from one to the next: the recurrent state decays to
zero, the convolution does not look back, attention and positions start anew. The gated delta rule is computed by
chunks; the states between chunks are found by a parallel scan, so that a step has no loop over the sequence.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
_FORGET = -60.0  # exp of it is zero beside one in fp32

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


class Packing:
    """Where documents begin in rows [B, T]: ``places`` counts from 0 in every document. Shared by all layers."""

    def __init__(self, places: Tensor, attention: bool = True) -> None:
        self.places = places
        self.first = places == 0
        document = self.first.cumsum(1)
        self.mask = None
        if attention:
            causal = torch.ones(places.shape[1], places.shape[1], dtype=torch.bool, device=places.device).tril()
            self.mask = (document[:, None, :, None] == document[:, None, None, :]) & causal


class Norm(nn.Module):
    """RMS norm whose weight is stored as its difference from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight, CONFIG["rms_norm_eps"]).type_as(x)


class GatedNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, CONFIG["rms_norm_eps"]) * F.silu(gate.float())


class GatedDelta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, self.key_dim, self.value_dim = (
            CONFIG["hidden_size"],
            CONFIG["linear_key_head_dim"],
            CONFIG["linear_value_head_dim"],
        )
        self.key_heads, self.value_heads = CONFIG["linear_num_key_heads"], CONFIG["linear_num_value_heads"]
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.sizes = [keys, keys, values]
        channels = sum(self.sizes)
        self.width = CONFIG["linear_conv_kernel_dim"]
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, self.width, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(self.value_heads))
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.norm = GatedNorm(self.value_dim)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        rows, length, _ = x.shape
        mixed = self._convolve(self.in_proj_qkv(x), packing.places)
        q, k, v = mixed.split(self.sizes, dim=-1)
        q = q.view(rows, length, self.key_heads, self.key_dim)
        k = k.view(rows, length, self.key_heads, self.key_dim)
        v = v.view(rows, length, self.value_heads, self.value_dim).float()
        groups = self.value_heads // self.key_heads
        q = unit(q.float()).repeat_interleave(groups, dim=2) * self.key_dim**-0.5
        k = unit(k.float()).repeat_interleave(groups, dim=2)
        beta = self.in_proj_b(x).float().sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        decay = torch.where(packing.first[..., None], _FORGET, decay)
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta_rule(q, k, v, decay, beta)
        gate = self.in_proj_z(x).view(rows, length, self.value_heads, self.value_dim)
        return self.out_proj(self.norm(out, gate).view(rows, length, -1).to(x.dtype))

    def _convolve(self, x: Tensor, places: Tensor) -> Tensor:
        """Causal depthwise convolution that does not look behind the start of a document."""
        weight = self.conv1d.weight[:, 0].to(x.dtype)
        total = x * weight[:, -1]
        for back in range(1, self.width):
            shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
            total = total + shifted * (places >= back)[..., None] * weight[:, -1 - back]
        return F.silu(total)


def unit(x: Tensor) -> Tensor:
    """Vectors of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """S = exp(decay) S + beta k (v - exp(decay) S^T k)^T; out = S^T q.

    All [B, T, heads, ...] in fp32; T is a multiple of CHUNK.
    """
    rows, length, heads, _ = q.shape
    q, k, v = (_chunks(x, rows, length, heads) for x in (q, k, v))
    decay, beta = (_chunks(x[..., None], rows, length, heads)[..., 0] for x in (decay, beta))
    total = decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril()
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = between.exp().where(lower, 0.0)
    scaled = k * beta[..., None]
    system = (scaled @ k.mT * between).tril(-1)
    right = torch.cat((v * beta[..., None], scaled * total.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(
        system + torch.eye(CHUNK, device=q.device), right, upper=False, unitriangular=True
    )
    new, seen = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    late = k * (total[..., -1:] - total).exp()[..., None]
    identity = torch.eye(k.shape[-1], device=q.device)
    carry = identity * total[..., -1].exp()[..., None, None] - late.mT @ seen
    states = _states_before(carry, late.mT @ new)
    found = new - seen @ states
    out = (q * total.exp()[..., None]) @ states + (q @ k.mT * between) @ found
    return out.transpose(2, 3).reshape(rows, length, heads, -1)


def _chunks(x: Tensor, rows: int, length: int, heads: int) -> Tensor:
    """[B, T, heads, d] as [B, chunks, heads, CHUNK, d]."""
    return x.view(rows, length // CHUNK, CHUNK, heads, -1).transpose(2, 3)


def _states_before(carry: Tensor, added: Tensor) -> Tensor:
    """The state before each chunk, where a chunk makes S into carry @ S + added: an inclusive scan, moved on by one."""
    count, step = carry.shape[1], 1
    while step < count:
        left_carry, left_added = carry[:, :-step], added[:, :-step]
        here = carry[:, step:]
        added = torch.cat((added[:, :step], here @ left_added + added[:, step:]), dim=1)
        carry = torch.cat((carry[:, :step], here @ left_carry), dim=1)
        step *= 2
    return torch.cat((torch.zeros_like(added[:, :1]), added[:, :-1]), dim=1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, self.size = CONFIG["hidden_size"], CONFIG["head_dim"]
        self.heads, self.pairs = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * self.size * 2, bias=False)
        self.k_proj = nn.Linear(hidden, self.pairs * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, self.pairs * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(self.size), Norm(self.size)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        rows, length, _ = x.shape
        q, gate = self.q_proj(x).view(rows, length, self.heads, 2 * self.size).chunk(2, dim=-1)
        k = self.k_proj(x).view(rows, length, self.pairs, self.size)
        v = self.v_proj(x).view(rows, length, self.pairs, self.size).transpose(1, 2)
        q = rotate(self.q_norm(q), packing.places).transpose(1, 2)
        k = rotate(self.k_norm(k), packing.places).transpose(1, 2)
        groups = self.heads // self.pairs
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q.type_as(v), k.type_as(v), v, attn_mask=packing.mask)
        out = out.transpose(1, 2).reshape(rows, length, -1)
        return self.o_proj(out * torch.sigmoid(gate.reshape(rows, length, -1)))


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotary embedding of the first part of each head. x: [B, T, heads, d]."""
    rope = CONFIG["rope_parameters"]
    size = int(x.shape[-1] * rope["partial_rotary_factor"])
    speeds = rope["rope_theta"] ** -(torch.arange(0, size, 2, device=x.device, dtype=torch.float) / size)
    angles = (places[..., None] * speeds)[:, :, None]
    cos, sin = angles.cos().type_as(x), angles.sin().type_as(x)
    a, b, rest = x.split((size // 2, size // 2, x.shape[-1] - size), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        hidden = CONFIG["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        if kind == "linear_attention":
            self.linear_attn = GatedDelta()
        else:
            self.self_attn = Attention()
        self.mixer = self.linear_attn if kind == "linear_attention" else self.self_attn
        self.mlp = Mlp()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        x = x + self.drop(self.mixer(self.input_layernorm(x), packing))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))


class Body(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.layers = nn.ModuleList(Layer(kind, dropout) for kind in CONFIG["layer_types"])
        self.norm = Norm(CONFIG["hidden_size"])
        self.drop = nn.Dropout(dropout)


class Model(nn.Module):
    """Logits of packed rows; the output matrix is the embedding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Body(dropout)
        self.compiled: list[Any] = []
        _initialise(self)

    def compile_layers(self) -> None:
        """Training goes through compiled layers from now on; one compilation serves all layers of a kind."""
        self.compiled = [torch.compile(layer) for layer in self.model.layers]

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        x = self.model.drop(self.model.embed_tokens(tokens))
        for layer in self.compiled if self.training and self.compiled else self.model.layers:
            x = layer(x, packing)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def public_weights(self) -> dict[str, Tensor]:
        """Parameters under their public names, each once."""
        return {name: value for name, value in self.state_dict().items() if ".mixer." not in name}


def _initialise(model: Model) -> None:
    """Normal matrices, smaller where a block ends; decays from slow to fast, steps from 0.001 to 0.1."""
    depth = 2 * CONFIG["num_hidden_layers"]
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            steps = torch.empty_like(parameter.data).uniform_(-6.9, -2.3).exp()
            parameter.data.copy_(steps + torch.log(-torch.expm1(-steps)))
        elif name.endswith("conv1d.weight"):
            nn.init.uniform_(parameter, -0.5, 0.5)
        elif parameter.dim() >= 2:
            last = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            scale = 0.02 if "embed" in name else 0.6 * parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=scale * (depth**-0.5 if last else 1.0))
