"""Time to the first token of a prompt whose long beginning is cached, against the same prompt cold, on this CPU.

A small real model (dummy weights; the work is the same) behind the real scheduler, tree and runner. Every prompt is a
shared prefix and a tail of its own; the cold ones have a prefix of their own too.

    python -m bench warm [--prefix N] [--tail N] [--repeats N]
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench import record
from hybserve.core.messages import Finished, Generate
from hybserve.core.sampling import SamplingParams
from hybserve.models.load import dummy_weights
from hybserve.models.registry import build_model
from hybserve.plan.layout import page_layout, slot_layout
from hybserve.plan.result import EngineLimits
from hybserve.runner.main import Runner
from hybserve.scheduler.loop import Loop
from hybserve.scheduler.scheduler import Scheduler
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.split import split_ranks

PAGE = 64
#: Warm over cold.
AIM = 0.1
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "float32", "vocab_size": 8192,
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": True,
    "max_position_embeddings": 32768, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


class Text:
    """The text role's end: what it sends, and the timing it is told."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.finished: list[Finished] = []

    def receive(self, timeout: float | None = None, /) -> list[Any]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: list[Any], /) -> None:
        self.finished += [message for message in messages if isinstance(message, Finished)]


class Engine:
    """``config``: a config.json; the weights are random."""

    def __init__(self, config: dict[str, Any], prefix: int, tail: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            spec = read_model_spec(Path(directory))
        share = split_ranks(spec)[0]
        model = build_model(spec, share, torch.float32)
        dummy_weights(model.params, 0)
        self.parameters = sum(tensor.numel() for tensor in model.params.values())
        longest = prefix + tail + 2 * PAGE
        slot = slot_layout(spec, share, "float32", "float32").slot_bytes
        price = slot / page_layout(spec, share, PAGE, "float32").page_bytes
        limits = EngineLimits(
            PAGE, 4 * longest // PAGE, 24, 2, longest, 2048, 2048, "float32", "float32", "float32", prefix=True,
            stateful=True, slot_price=price,
        )  # fmt: skip
        self.vocab, self.text = spec.vocab_size, Text()
        self.scheduler = Scheduler(limits, 8, None, time.monotonic)
        self.loop = Loop(self.scheduler, Runner(model, spec, share, limits), self.text)

    def ask(self, uid: int, prompt: list[int], anchor: int) -> Finished:
        """One request of one token, alone."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        self.text.inbox.append(Generate(uid, prompt, sampling, 1, "", "", 0, time.monotonic(), 0.0, [anchor]))
        while not self.text.finished or self.text.finished[-1].uid != uid:
            self.loop.turn(0)
        return self.text.finished[-1]


def measure(config: dict[str, Any], prefix: int, tail: int, repeats: int) -> dict[str, Any]:
    """Milliseconds to the first token, cold and warm, and the tokens that were reused."""
    rng = random.Random(0)
    engine = Engine(config, prefix, tail)

    def ids(count: int) -> list[int]:
        return [rng.randrange(engine.vocab) for _ in range(count)]

    engine.ask(0, ids(PAGE), 0)  # everything has run once
    cold: list[Finished] = []
    warm: list[Finished] = []
    for repeat in range(repeats):
        shared = ids(prefix)
        cold.append(engine.ask(2 * repeat + 1, shared + ids(tail), prefix))
        warm.append(engine.ask(2 * repeat + 2, shared + ids(tail), prefix))
    of = {"cold": cold, "warm": warm}
    ttft = {name: statistics.median(finished.timing.ttft for finished in some) for name, some in of.items()}
    return {
        "parameters": engine.parameters,
        "prefix": prefix,
        "tail": tail,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "cold_hits": [finished.cache.hit for finished in cold],
        "warm_hits": [finished.cache.hit for finished in warm],
        "cold_ttft_ms": round(ttft["cold"], 1),
        "warm_ttft_ms": round(ttft["warm"], 1),
        "ratio": round(ttft["warm"] / ttft["cold"], 4),
        "aim": AIM,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench warm", description="cold and warm time to the first token")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--tail", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = measure(MODEL, options.prefix, options.tail, options.repeats)
    path = record("warm", figures, sys.orig_argv, ("torch",))
    print(f"cold {figures['cold_ttft_ms']} ms, warm {figures['warm_ttft_ms']} ms, ratio {figures['ratio']}: {path}")
    return 0 if figures["ratio"] <= AIM else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
