"""What a decode step costs the host: scheduler, codec and settling, with the device taken away.

The runner here computes nothing: it decodes the plan as the real one does and answers with tokens that are never a
stop token. Everything else is the engine as it serves, one plan ahead, in one thread. Prompt lengths differ, so that
page boundaries are spread over the steps as they are in service. Measured without the prefix tree and with it, where
the state at every page boundary is exported, held and, at the next one, replaced.

    python -m bench engine [--rows N] [--steps N]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench import percentile, record
from hybserve.core.messages import (
    FromRunner,
    FromScheduler,
    Generate,
    StepDone,
    StepPlan,
    ToRunner,
)
from hybserve.core.sampling import SamplingParams
from hybserve.plan.result import EngineLimits
from hybserve.scheduler.prefix import Prefix
from hybserve.scheduler.scheduler import Scheduler
from hybserve.wire.codec import Codec

PAGE = 64
PROMPT = 512
WARM_UP = 200
AIM_MS = 1.5
#: Steps that one engine makes before it is the other's turn: a page's worth, so that every turn passes each boundary.
TURN = PAGE
#: What the prefix tree may add to a step.
TREE_COST_BAR = 0.15

PARTS = ("plan", "encode plan", "decode plan", "encode result", "decode result", "settle", "encode tokens")


class Stopwatch:
    """Milliseconds of named parts, one entry a step each."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {name: [] for name in PARTS}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter_ns()
        result = work()
        self.parts[name].append((time.perf_counter_ns() - began) / 1e6)
        return result

    def totals(self) -> list[float]:
        return [sum(step) for step in zip(*self.parts.values(), strict=True)]

    def clear(self) -> None:
        for values in self.parts.values():
            values.clear()


class Engine:
    """The engine loop with a stopwatch between its parts; the plan of step n+1 is made before n is settled."""

    def __init__(self, rows: int, steps: int, prefix: bool = False) -> None:
        longest = PROMPT + WARM_UP + steps + 16
        pages = rows * (-(-longest // PAGE)) + 1
        slots = rows + 1 + (rows + 32 if prefix else 0)
        limits = EngineLimits(
            PAGE, pages, slots, rows, longest, 8192, 2048, "bfloat16", "float32", "bfloat16", prefix=prefix,
            slot_price=30.0,
        )  # fmt: skip
        self.watch = Stopwatch()
        self.scheduler = Scheduler(limits, rows, None, time.monotonic)
        self._plans: Codec[ToRunner] = Codec(ToRunner)
        self._results: Codec[FromRunner] = Codec(FromRunner)
        self._told: Codec[FromScheduler] = Codec(FromScheduler)
        for uid in range(rows):
            prompt = [uid % 1000] * (PROMPT - uid % PAGE)  # no two share a page
            sampling = SamplingParams(temperature=0.0, max_tokens=longest - PROMPT, stop_ids=(151_645, 151_643))
            self.scheduler.receive(Generate(uid, prompt, sampling, 1, "", "", 0, time.monotonic(), 0.0))
        self.frame = self._plan()
        while any(sequence.planned < sequence.fill for sequence in self.scheduler.running.sequences) or len(
            self.scheduler.waiting
        ):
            self.step()

    @property
    def prefix(self) -> Prefix:
        return self.scheduler.running.prefix

    def step(self) -> None:
        """One pass: launch n, plan n+1, wait for n, settle n."""
        launched = self.frame
        plan = self.watch("decode plan", lambda: self._plans.decode(launched))[-1]
        assert isinstance(plan, StepPlan)
        self.frame = self._plan()
        tokens = [100 + plan.step % 1000] * len(plan.sample_seqs)
        exported = plan.export_positions
        done = StepDone(plan.step, plan.epoch, tokens, [], [], [], 1.0, exported, [True] * len(exported))
        answer = self.watch("encode result", lambda: self._results.encode([done]))
        (result,) = self.watch("decode result", lambda: self._results.decode(answer))
        self.watch("settle", lambda: self.scheduler.settle(result))
        self.watch("encode tokens", lambda: self._told.encode(self.scheduler.outbox()))

    def _plan(self) -> bytes:
        frame = self.watch("plan", self.scheduler.plan)
        encoded: bytes = self.watch("encode plan", lambda: self._plans.encode(frame))
        return encoded


def measure(rows: int, steps: int) -> dict[str, Any]:
    """Figures without the prefix tree, under ``with_prefix_tree`` those with it, and what the tree costs.

    The two engines take turns of ``TURN`` steps each, so that what else the machine does falls on both alike;
    ``tree_cost`` is the median over all turns of a turn's median step with the tree by that without, less one. Every
    step passes as many boundaries as any other, so its median step is what a turn costs where nothing else intrudes.
    """
    without, with_tree = engines = Engine(rows, steps), Engine(rows, steps, prefix=True)
    for engine in engines:
        for _ in range(WARM_UP):
            engine.step()
        engine.watch.clear()
    for _ in range(steps // TURN):
        for engine in engines:
            for _ in range(TURN):
                engine.step()
    costs = [after / before - 1 for before, after in zip(_turns(without), _turns(with_tree), strict=True)]
    return {
        **_figures(without, rows),
        "with_prefix_tree": _figures(with_tree, rows) | {"checkpoints": dict(with_tree.prefix.checkpoints)},
        "tree_cost": round(statistics.median(costs), 4),
        "tree_cost_bar": TREE_COST_BAR,
    }


def _turns(engine: Engine) -> list[float]:
    totals = engine.watch.totals()
    return [statistics.median(totals[low : low + TURN]) for low in range(0, len(totals), TURN)]


def _figures(engine: Engine, rows: int) -> dict[str, Any]:
    """Median and 99th percentile of milliseconds per step, in all and by part."""
    totals = engine.watch.totals()
    return {
        "rows": rows,
        "steps": len(totals),
        "median_ms": round(statistics.median(totals), 4),
        "p99_ms": round(percentile(totals, 0.99), 4),
        "aim_ms": AIM_MS,
        "median_ms_by_part": {name: round(statistics.median(part), 4) for name, part in engine.watch.parts.items()},
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench engine", description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args(arguments)
    figures = measure(options.rows, options.steps)
    path = record("engine", figures, ["python", "-m", "bench", "engine", *arguments], ["msgspec"])
    for name, some in (("without", figures), ("with", figures["with_prefix_tree"])):
        print(
            f"{some['rows']} decoding rows {name} prefix tree: "
            f"median {some['median_ms']:.3f} ms a step, p99 {some['p99_ms']:.3f}"
        )
        for part, value in some["median_ms_by_part"].items():
            print(f"  {part:<14} {value:.3f} ms")
    print(f"the tree costs {figures['tree_cost']:+.1%}, at most {TREE_COST_BAR:+.0%} is meant")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
