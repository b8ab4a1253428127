"""The engine against ``generate`` of transformers: one random model of about 30 M parameters, the same prompts.

Both sides run in this process with the same number of threads, in turns, so that what else the machine does meets
both. Our side is the engine as it serves (planned limits, scheduler, frames, runner) without HTTP; theirs is
``generate`` with its cache and its default attention. All greedy, lengths fixed, fp32. Prompts are new for every
measurement: nothing is reused between them.

    alone    eight requests one after another, each side            bar: not slower
    at once  eight requests in one engine, against alone theirs     bar: twice as fast
    padded   the same eight, against one left-padded batch theirs   bar: not slower

The padded batch runs to its longest output; tokens beyond a request's own length are not counted. ``uniform`` is the
same with equal lengths, where padding wastes nothing.

    python -m bench vs_transformers [--rounds N] [--threads N ...]
"""

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from bench import record
from hybserve.config.load import load_deployment
from hybserve.core.messages import Finished, Generate, Tokens
from hybserve.core.sampling import SamplingParams
from hybserve.launch.cores import engine_threads
from hybserve.launch.prepare import prepare
from hybserve.runner.main import build_runner
from hybserve.scheduler.loop import Loop
from hybserve.scheduler.scheduler import Scheduler

CONFIG: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
#: (prompt, output) tokens of the eight requests.
WORKLOADS = {
    "mixed": [(64, 128), (128, 32), (192, 96), (256, 64), (320, 80), (384, 112), (448, 48), (512, 100)],
    "uniform": [(256, 64)] * 8,
}
#: Ours over theirs must not be less: (our way, their way) -> bar.
BARS = {("alone", "alone"): 1.0, ("at once", "alone"): 2.0, ("at once", "padded"): 1.0}
#: Top-2 margin of their logits below which the two may choose differently, and go on with different texts.
NEAR_TIE = 1e-3

Lengths = list[tuple[int, int]]
Prompts = list[list[int]]
Outputs = list[list[int]]


class Ours:
    """The engine: scheduler, frames and runner in one thread, with the limits that the planner gives by default."""

    def __init__(self, directory: Path) -> None:
        deployment = load_deployment(None, [f"model.path={directory}"])
        prepared = prepare(deployment, directory)
        limits = prepared.plan.engine
        assert limits is not None
        runner = build_runner(deployment, prepared.spec, limits, directory)
        self._scheduler = Scheduler(limits, 64, None, time.monotonic)
        self._loop = Loop(self._scheduler, runner, self)
        self._uids = itertools.count()
        self._inbox: list[Any] = []
        self._heard: list[Any] = []

    def receive(self, timeout: float | None = None, /) -> list[Any]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, messages: list[Any], /) -> None:
        self._heard += messages

    def generate(self, prompts: Prompts, lengths: Lengths) -> Outputs:
        """All at once."""
        uids = [next(self._uids) for _ in prompts]
        self._heard = []
        for uid, prompt, (_, tokens) in zip(uids, prompts, lengths, strict=True):
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
            self._inbox.append(Generate(uid, prompt, sampling, 1, "", "", 0, time.monotonic(), 0.0))
        while self._inbox or self._loop.busy or not self._scheduler.idle:
            self._loop.turn(0)
        outputs: dict[int, list[int]] = {uid: [] for uid in uids}
        for message in self._heard:
            if isinstance(message, Tokens):
                for uid, token in zip(message.uids, message.tokens, strict=True):
                    outputs[uid].append(token)
        assert sum(isinstance(message, Finished) for message in self._heard) == len(uids)
        return list(outputs.values())


class Theirs:
    """``transformers``: generate with its cache."""

    def __init__(self, directory: Path) -> None:
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._model.train(False)

    def generate(self, prompts: Prompts, lengths: Lengths) -> Outputs:
        """One batch, padded on the left, up to the longest output."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        tokens = max(tokens for _, tokens in lengths)
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
        return [row[longest : longest + own].tolist() for row, (_, own) in zip(out, lengths, strict=True)]

    def margins(self, tokens: list[int]) -> list[float]:
        """Of the two likeliest successors after every token."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        best = torch.topk(logits, 2).values
        return (best[:, 0] - best[:, 1]).tolist()


class Sample(NamedTuple):
    seconds: float
    prompts: Prompts
    outputs: Outputs


def ways(ours: Ours, theirs: Theirs) -> dict[tuple[str, str], Callable[[Prompts, Lengths], Outputs]]:
    """Everything that is measured, in the order in which it is measured."""

    def alone(generate: Callable[[Prompts, Lengths], Outputs]) -> Callable[[Prompts, Lengths], Outputs]:
        return lambda prompts, lengths: [
            generate([prompt], [length])[0] for prompt, length in zip(prompts, lengths, strict=True)
        ]

    return {
        ("ours", "alone"): alone(ours.generate),
        ("theirs", "alone"): alone(theirs.generate),
        ("ours", "at once"): ours.generate,
        ("theirs", "padded"): theirs.generate,
    }


def measure(
    ways: dict[tuple[str, str], Callable[[Prompts, Lengths], Outputs]],
    lengths: Lengths,
    rounds: int,
    source: random.Random,
) -> list[dict[tuple[str, str], Sample]]:
    """``rounds`` turns through all ways, after one short turn that is not counted."""
    turns = []
    for index in range(-1, rounds):
        own = lengths if index >= 0 else [(prompt, 4) for prompt, _ in lengths]
        turn = {}
        for way, generate in ways.items():
            prompts = [[source.randrange(CONFIG["vocab_size"]) for _ in range(count)] for count, _ in own]
            began = time.perf_counter()
            outputs = generate(prompts, own)
            turn[way] = Sample(time.perf_counter() - began, prompts, outputs)
        if index >= 0:
            turns.append(turn)
    return turns


def figures(turns: list[dict[tuple[str, str], Sample]], lengths: Lengths) -> dict[str, Any]:
    """Median seconds and output tokens a second of every way; of every bar the median over the rounds of the ratio
    within a round, and all of them."""
    tokens = sum(output for _, output in lengths)
    table = {}
    for side, way in turns[0]:
        seconds = statistics.median(turn[side, way].seconds for turn in turns)
        table[f"{side} {way}"] = {"seconds": round(seconds, 3), "output_tokens_per_s": round(tokens / seconds, 1)}
    bars = {}
    for (our, their), bar in BARS.items():
        ratios = [turn["theirs", their].seconds / turn["ours", our].seconds for turn in turns]
        median = statistics.median(ratios)
        bars[f"ours {our} over theirs {their}"] = {
            "times_as_fast": round(median, 3),
            "rounds": [round(ratio, 3) for ratio in ratios],
            "bar": bar,
            "met": median >= bar,
        }
    return {"ways": table, "bars": bars}


def agreement(
    turns: list[dict[tuple[str, str], Sample]], ours: Ours, theirs: Theirs, lengths: Lengths
) -> dict[str, Any]:
    """Whether both sides say the same on the prompts of the first round: our requests at once against theirs alone, and
    their padded batch against theirs alone. ``wrong``: first differences that are no near tie."""
    found: dict[str, Any] = {}
    padded = turns[0]["theirs", "padded"]
    mixed = turns[0]["ours", "at once"]
    for name, sample in (("ours at once", mixed), ("theirs padded", padded)):
        equal, near, wrong = 0, 0, 0
        for prompt, output, length in zip(sample.prompts, sample.outputs, lengths, strict=True):
            (expected,) = theirs.generate([prompt], [length])
            first = next((i for i, pair in enumerate(zip(output, expected, strict=True)) if pair[0] != pair[1]), None)
            if first is None:
                equal += 1
            elif theirs.margins(prompt + expected[:first])[-1] < NEAR_TIE:
                near += 1
            else:
                wrong += 1
        found[name] = {"equal": equal, "near_tie": near, "wrong": wrong}
    return found


def make_model(directory: Path) -> int:
    """Write a checkpoint with random weights; returns the number of its parameters."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**CONFIG)
    config.dtype = "float32"
    model = transformers.Qwen3_5ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def show(threads: int, name: str, result: dict[str, Any]) -> None:
    print(f"{name}, threads: {threads}")
    for way, entry in result["ways"].items():
        print(f"  {way:<16} {entry['seconds']:7.2f} s {entry['output_tokens_per_s']:8.1f} tokens/s")
    for name, entry in result["bars"].items():
        verdict = "met" if entry["met"] else "MISSED"
        print(f"  {name:<36} {entry['times_as_fast']:.2f} times as fast (bar {entry['bar']}, {verdict})", flush=True)


def main(arguments: list[str]) -> int:
    """Exit code 1 if a bar is missed or an output is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench vs_transformers", description="against generate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[engine_threads()], help="default: the engine's own")
    options = parser.parse_args(arguments)
    results, wrong, source = [], 0, random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        parameters = make_model(Path(directory))
        ours, theirs = Ours(Path(directory)), Theirs(Path(directory))
    for threads, (name, lengths) in itertools.product(options.threads, WORKLOADS.items()):
        torch.set_num_threads(threads)
        turns = measure(ways(ours, theirs), lengths, options.rounds, source)
        result = figures(turns, lengths)
        result["agreement"] = agreement(turns, ours, theirs, lengths)
        wrong += sum(entry["wrong"] for entry in result["agreement"].values())
        show(threads, name, result)
        results.append({"workload": name, "threads": threads, "requests": lengths, **result})
    content = {"parameters": parameters, "model": CONFIG, "rounds": options.rounds, "near_tie": NEAR_TIE}
    command = ["python", "-m", "bench", "vs_transformers", *arguments]
    path = record("vs_transformers", content | {"results": results}, command, ("torch", "transformers"))
    missed = sum(not bar["met"] for result in results for bar in result["bars"].values())
    print(f"{missed} bars missed, {wrong} outputs wrong: {path}")
    return 1 if missed or wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
