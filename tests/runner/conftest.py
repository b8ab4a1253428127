"""A model small enough to read, with a state and pages, and a runner of it."""

from dataclasses import dataclass

import pytest
import torch

from bench.plan_driver import Driver
from hybserve.layers.step_context import StepContext
from hybserve.plan.result import EngineLimits
from hybserve.runner.device_pools import DevicePools
from hybserve.runner.main import Runner
from hybserve.spec.model_spec import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelSpec
from hybserve.spec.split import split_ranks

VOCAB = 40
WIDTH = 8

SPEC = ModelSpec(
    family="qwen3_5",
    vocab_size=VOCAB,
    hidden=WIDTH,
    ffn=8,
    layers=(LayerSpec("gated_delta", "dense"), LayerSpec("attention", "dense")),
    attention=AttentionSpec(q_heads=1, kv_heads=1, head_dim=WIDTH, rotary_dim=4, rope_theta=1e4),
    gated_delta=GatedDeltaSpec(key_heads=1, value_heads=1, key_dim=WIDTH, value_dim=1, conv_width=2),
    moe=None,
    norm_eps=1e-6,
    tied=True,
    dtype="float32",
    max_seq_len=64,
)


class MeanModel:
    """hidden(p) = decayed sum of embeddings (the state) + mean of the embeddings on its pages [0, p].

    ``hurt`` maps a token id to a value that its hidden state takes (NaN injection).
    """

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.embed = torch.randn(VOCAB, WIDTH, generator=random)
        self.head = torch.randn(WIDTH, VOCAB, generator=random)
        self.params = {"embed.weight": self.embed, "lm_head.weight": self.head.T}
        self.hurt: dict[int, float] = {}
        self.fail = False

    def forward(self, tokens_T: torch.Tensor, context: StepContext) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("cannot read /secret/place at 0x7f00")
        hidden_TD = torch.zeros(len(tokens_T), WIDTH)
        low, high = context.tile if context.deterministic else (0, len(tokens_T))
        pages = context.kv_layers[0].permute(0, 3, 1, 2, 4).reshape(-1, 2, WIDTH)  # a copy: [P * G, 2, d]
        for row in range(context.rows):
            for at in range(max(low, context.bounds[row]), min(high, context.bounds[row + 1])):
                position = context.starts[row] + at - context.bounds[row]
                assert position == int(context.positions_T[at])
                embedded = self.embed[tokens_T[at]]
                state = context.matrices[0][context.slots[row], 0, :, 0]
                state.copy_(embedded if position == 0 else 0.9 * state + embedded)
                location = int(context.locations_T[at])
                context.kv_layers[0][location // context.page_size, :, 0, location % context.page_size] = embedded
                pages[location] = embedded
                table = context.block_tables[row]
                seen = [
                    table[p // context.page_size] * context.page_size + p % context.page_size
                    for p in range(position + 1)
                ]
                hidden_TD[at] = state + pages[seen, 0].mean(0)
                if int(tokens_T[at]) in self.hurt:
                    hidden_TD[at] = self.hurt[int(tokens_T[at])]
        return hidden_TD

    def logits(self, hidden_ND: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
        return hidden_ND @ self.head


@dataclass
class Bench:
    model: MeanModel
    runner: Runner
    driver: Driver
    limits: EngineLimits


def _limits(**changes: object) -> EngineLimits:
    values: dict[str, object] = {
        "page_size": 4, "kv_pages": 40, "state_slots": 9, "max_running": 8, "max_seq_len": 64, "step_tokens": 64,
        "prefill_chunk": 64, "kv_dtype": "float32", "state_dtype": "float32", "conv_dtype": "float32",
    }  # fmt: skip
    return EngineLimits(**{**values, **changes})  # type: ignore[arg-type]


def _make(**changes: object) -> Bench:
    limits = _limits(**changes)
    model = MeanModel()
    runner = Runner(model, SPEC, split_ranks(SPEC)[0], limits, poison=True)
    return Bench(model, runner, Driver(runner, limits), limits)


@pytest.fixture(params=[False, True], ids=["batched", "deterministic"])
def bench(request: pytest.FixtureRequest) -> Bench:
    torch.set_num_threads(1)
    return _make(deterministic=request.param)


@pytest.fixture
def make_bench():
    """A fresh bench, batched: the cold single run that others are compared with."""
    return _make


@pytest.fixture
def make_limits():
    return _limits


@pytest.fixture
def runner_pools() -> DevicePools:
    return DevicePools(SPEC, split_ranks(SPEC)[0], _limits())
