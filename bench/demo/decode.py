"""Greedy decoding of many prompts at once, token by token, with the recurrent form of the layers of ``model``."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.demo.model import Attention, GatedDelta, Model, rotate, unit
from bench.demo.tokenizer import END_OF_TEXT, IM_END


@torch.no_grad()
def decode(
    model: Model, prompts: Sequence[Sequence[int]], longest: int, device: str
) -> tuple[list[list[int]], list[bool]]:
    """At most ``longest`` tokens after each prompt, the end of turn left out, and whether that came."""
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    size = int(starts.max()) + longest
    tokens = torch.full((len(prompts), size), END_OF_TEXT, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    memories = [_Memory(layer.mixer, len(prompts), size, device) for layer in model.model.layers]
    lengths = starts + longest
    for place in range(size - 1):
        x = model.model.embed_tokens(tokens[:, place])
        for layer, memory in zip(model.model.layers, memories, strict=True):
            x = x + memory.step(layer.input_layernorm(x), place)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        chosen = F.linear(model.model.norm(x), model.model.embed_tokens.weight).argmax(-1)
        ends = (chosen == IM_END) | (chosen == END_OF_TEXT)
        lengths = torch.where(ends & (place + 1 >= starts), lengths.clamp(max=place + 1), lengths)
        tokens[:, place + 1] = torch.where(place + 1 < starts, tokens[:, place + 1], chosen)
        if place % 16 == 0 and bool((lengths <= place + 1).all()):
            break
    ended = (lengths < starts + longest).tolist()
    bounds = zip(tokens.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    return [row[start:end] for row, start, end in bounds], ended


class _Memory:
    """What one layer keeps of the tokens before: a window and a state, or keys and values."""

    def __init__(self, mixer: Attention | GatedDelta, rows: int, size: int, device: str) -> None:
        self.mixer = mixer
        if isinstance(mixer, GatedDelta):
            self.window = torch.zeros(rows, mixer.width, sum(mixer.sizes), device=device)
            self.state = torch.zeros(rows, mixer.value_heads, mixer.key_dim, mixer.value_dim, device=device)
        else:
            self.keys = torch.zeros(rows, mixer.pairs, size, mixer.size, device=device)
            self.values = torch.zeros_like(self.keys)

    def step(self, x: Tensor, place: int) -> Tensor:
        """x: [N, hidden], the normalised input at ``place`` of every row."""
        return self._recur(self.mixer, x) if isinstance(self.mixer, GatedDelta) else self._attend(self.mixer, x, place)

    def _recur(self, mixer: GatedDelta, x: Tensor) -> Tensor:
        self.window = torch.cat((self.window[:, 1:], mixer.in_proj_qkv(x)[:, None]), dim=1)
        mixed = F.silu((self.window * mixer.conv1d.weight[:, 0].T).sum(1))
        q, k, v = mixed.split(mixer.sizes, dim=-1)
        groups = mixer.value_heads // mixer.key_heads
        q, k = (unit(y.view(len(x), -1, mixer.key_dim)).repeat_interleave(groups, dim=1) for y in (q, k))
        beta = mixer.in_proj_b(x).sigmoid()[..., None]
        decay = (-mixer.A_log.exp() * F.softplus(mixer.in_proj_a(x) + mixer.dt_bias)).exp()
        self.state *= decay[..., None, None]
        new = beta * (v.view(len(x), -1, mixer.value_dim) - (k[..., None, :] @ self.state)[..., 0, :])
        self.state += k[..., None] * new[..., None, :]
        out = (q[..., None, :] @ self.state)[..., 0, :] * mixer.key_dim**-0.5
        gate = mixer.in_proj_z(x).view(len(x), -1, mixer.value_dim)
        return mixer.out_proj(mixer.norm(out, gate).flatten(1))

    def _attend(self, mixer: Attention, x: Tensor, place: int) -> Tensor:
        q, gate = mixer.q_proj(x).view(len(x), 1, mixer.heads, 2 * mixer.size).chunk(2, dim=-1)
        k = mixer.k_proj(x).view(len(x), 1, mixer.pairs, mixer.size)
        places = torch.full((len(x), 1), place, device=x.device)
        self.keys[:, :, place] = rotate(mixer.k_norm(k), places)[:, 0]
        self.values[:, :, place] = mixer.v_proj(x).view(len(x), mixer.pairs, mixer.size)
        q = rotate(mixer.q_norm(q), places).transpose(1, 2)
        groups = mixer.heads // mixer.pairs
        k, v = (y[:, :, : place + 1].repeat_interleave(groups, dim=1) for y in (self.keys, self.values))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return mixer.o_proj((out * torch.sigmoid(gate)).reshape(len(x), -1))
