"""The parity matrix: a real runner against ``transformers``, however a request is batched, cut, parked and resumed.

Every case runs the same requests through hand-made plans and compares each sampled token and its logits with what
``transformers`` computes for the whole sequence at once; in deterministic mode also bit by bit with our own cold run
(one request alone, whole prompt). CI runs every pair of values (tests/e2e/test_parity.py);

    python -m bench parity [--seeds N]

runs the whole product and writes bench/results/parity.json.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench import record
from bench.plan_driver import Driver, Live, recorded_logits
from hybserve.core.sampling import SamplingParams
from hybserve.models.base import Model
from hybserve.models.load import load_weights
from hybserve.models.registry import build_model
from hybserve.plan.result import EngineLimits
from hybserve.runner.main import Runner
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import split_ranks
from tests.checkpoints import SHAPES, load_reference, make_checkpoint

GREEDY = SamplingParams(temperature=0.0)
#: Prompt lengths of the requests of a case, per page size: below, at and beyond pages and chunks of three pages.
LENGTHS = {4: (12, 1, 4, 5, 13, 21, 30), 64: (200, 3, 64, 65, 128, 191, 193)}
OUTPUTS = 9
#: Largest |difference| over the row's largest |logit|, against transformers in fp32.
TOLERANCE = 1e-4
#: Top-2 margin below which the two may choose differently; what follows is another text and is not compared.
NEAR_TIE = 1e-3
WHOLE = 0  # chunk: the whole prompt in one step


class Case(NamedTuple):
    shape: str
    batch: int
    chunk: int  # in pages
    parked: bool
    deterministic: bool
    page: int = 4
    seed: int = 0


FACTORS: dict[str, tuple[object, ...]] = {
    "shape": tuple(SHAPES),
    "batch": (1, 7),
    "chunk": (1, 3, WHOLE),
    "parked": (False, True),
    "deterministic": (False, True),
}


class Tally:
    """What a comparison saw."""

    def __init__(self) -> None:
        self.rows = 0
        self.near_ties = 0
        self.largest = 0.0  # against transformers, relative to the row's largest |logit|
        self.shaky = 0  # rows beyond TOLERANCE where transformers itself moves as far under rounding noise

    def add(self, other: "Tally") -> None:
        self.rows += other.rows
        self.near_ties += other.near_ties
        self.shaky += other.shaky
        self.largest = max(self.largest, other.largest)


class Mismatch(AssertionError):
    """A token or a logit differs where it must not."""


class Truth(NamedTuple):
    """One request as it must come out."""

    prompt: list[int]
    output: list[int]
    oracle: torch.Tensor  # logits of transformers at every sampled position [outputs, C]
    bits: torch.Tensor  # logits of our cold deterministic run [outputs, C]
    noise: Callable[[], torch.Tensor]  # how far rounding noise moves the oracle's own rows [outputs]


class Subject:
    """One shape: our model, and the truths of its requests, made when first asked for."""

    def __init__(self, shape: str, directory: Path) -> None:
        path = make_checkpoint(directory, shape)
        self.spec: ModelSpec = read_model_spec(path)
        self._share = split_ranks(self.spec)[0]
        self.model: Model = build_model(self.spec, self._share, torch.float32)
        load_weights(path, self.spec, self._share, self.model.params)
        self._reference = load_reference(path)
        self._truths: dict[tuple[int, ...], list[Truth]] = {}

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        source = torch.Generator().manual_seed(len(lengths))
        return [torch.randint(0, self.spec.vocab_size, (n,), generator=source).tolist() for n in lengths]

    def truths(self, page: int) -> list[Truth]:
        key = (page,)
        if key not in self._truths:
            self._truths[key] = [self.truth(prompt, page) for prompt in self.prompts(LENGTHS[page])]
        return self._truths[key]

    def truth(self, prompt: list[int], page: int, outputs: int = OUTPUTS) -> Truth:
        (live,), (bits,) = self.run([prompt], Case("", 1, WHOLE, False, True, page), outputs)
        oracle = self.oracle(live.tokens)[len(prompt) - 1 : -1]
        return Truth(prompt, live.output, oracle, bits, lambda: self._noise(live.tokens, oracle))

    def oracle(self, tokens: list[int]) -> torch.Tensor:
        """Logits of transformers after every token [T, C]."""
        with torch.inference_mode():
            return self._reference(torch.tensor([tokens]), use_cache=False).logits[0].float()

    def _noise(self, tokens: list[int], oracle: torch.Tensor) -> torch.Tensor:
        """Largest move of each row, in its largest |logit|, over four runs of transformers whose embeddings are shaken
        by one part in 10⁷, the rounding of fp32."""
        embeddings, random = self._reference.get_input_embeddings().weight.data, torch.Generator().manual_seed(0)
        exact = embeddings.clone()
        moves = []
        for _ in range(4):
            embeddings.copy_(exact * (1 + 1e-7 * torch.randn(exact.shape, generator=random)))
            rows = self.oracle(tokens)[-len(oracle) - 1 : -1]
            moves.append((rows - oracle).abs().amax(-1) / oracle.abs().amax(-1))
        embeddings.copy_(exact)
        return torch.stack(moves).amax(0)

    def run(self, prompts: list[list[int]], case: Case, outputs: int) -> tuple[list[Live], list[torch.Tensor]]:
        """Generate for all prompts under the case's schedule; the sequences and the logits they sampled from."""
        needed = sum(-(-(len(prompt) + outputs) // case.page) for prompt in prompts)
        limits = EngineLimits(
            page_size=case.page, kv_pages=needed + 2, state_slots=len(prompts) + 2, max_running=len(prompts),
            max_seq_len=1024, step_tokens=4096, prefill_chunk=4096, kv_dtype="float32", state_dtype="float32",
            conv_dtype="float32", deterministic=case.deterministic,
        )  # fmt: skip
        runner = Runner(self.model, self.spec, self._share, limits, poison=True)
        driver = Driver(runner, limits)
        lives = [Live(prompt, GREEDY, 0) for prompt in prompts]
        logits: dict[int, list[torch.Tensor]] = {id(live): [] for live in lives}
        with recorded_logits() as rows:
            for sampled in schedule(driver, lives, case, outputs):
                for live, (_, row) in zip(sampled, rows, strict=True):
                    logits[id(live)].append(row)
                rows.clear()
        if not runner.pools.padding_intact():
            raise Mismatch("the padding page or slot was written")
        return lives, [torch.stack(logits[id(live)]) for live in lives]


def schedule(driver: Driver, lives: list[Live], case: Case, outputs: int) -> Iterator[list[Live]]:
    """Run until all have their outputs; yields, per step, those that sampled, in order of their rows.

    Arrivals are staggered and rows change places from step to step. With ``parked`` every sequence is thrown off the
    device once or more, at any step of prefill and decode, and comes back a few steps later.
    """
    rng = random.Random(f"{case}")
    waiting = {id(live): index // 2 for index, live in enumerate(lives)}  # steps until it (re)enters
    parks = {id(live): rng.randint(1, 3) if case.parked else 0 for live in lives}
    chunk = case.chunk * case.page or 1 << 20
    open_lives = list(lives)
    while open_lives:
        for live in open_lives:
            if live.seq < 0 and waiting[id(live)] <= 0:
                driver.resume(live)
            waiting[id(live)] -= 1
        active = [live for live in open_lives if live.seq >= 0]
        rng.shuffle(active)
        work = [(live, min(chunk, live.todo)) for live in active]
        sampled = [live for live, count in work if count == live.todo]
        if work:
            driver.step(work)
            yield sampled
        for live in active:
            steps_left = -(-live.todo // chunk) + outputs - len(live.output)
            if len(live.output) == outputs:
                driver.release(live)
                open_lives.remove(live)
            elif parks[id(live)] and rng.random() < 2 * parks[id(live)] / (steps_left + 1):
                parks[id(live)] -= 1
                driver.release(live)
                waiting[id(live)] = rng.randint(0, 2)


def check_case(subject: Subject, case: Case) -> Tally:
    """Raises Mismatch where the case departs from the truth."""
    truths = subject.truths(case.page)[: case.batch]
    lives, logits = subject.run([truth.prompt for truth in truths], case, OUTPUTS)
    tally = Tally()
    for truth, live, rows in zip(truths, lives, logits, strict=True):
        tally.add(compare(truth, live.output, rows, case))
    return tally


def compare(truth: Truth, output: list[int], rows: torch.Tensor, case: Case) -> Tally:
    tally = Tally()
    for index, (token, row, oracle) in enumerate(zip(output, rows, truth.oracle, strict=True)):
        where = f"{case}: prompt of {len(truth.prompt)}, output {index}"
        difference = float((row - oracle).abs().max() / oracle.abs().max())
        tally.rows += 1
        tally.largest = max(tally.largest, difference)
        if not difference <= TOLERANCE:
            noise = float(truth.noise()[index])
            if not difference <= noise:
                raise Mismatch(f"{where}: logits differ by {difference:.2e} of the row's largest (noise {noise:.1e})")
            tally.shaky += 1
        if case.deterministic and not torch.equal(row, truth.bits[index]):
            raise Mismatch(f"{where}: logits are not bit-equal to the cold run")
        best = torch.topk(oracle, 2)
        near = float(best.values[0] - best.values[1]) < NEAR_TIE
        tally.near_ties += near
        if token not in (best.indices.tolist() if near else best.indices[:1].tolist()):
            raise Mismatch(f"{where}: token {token}, transformers has {int(best.indices[0])}")
        if token != truth.output[index]:
            break
    return tally


def pairwise(factors: dict[str, tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Combinations in which every two values of different factors meet, greedily few (about the product of the two
    largest factors)."""
    names = list(factors)
    pairs = list(itertools.combinations(range(len(names)), 2))
    open_pairs = {(a, x, b, y) for a, b in pairs for x in factors[names[a]] for y in factors[names[b]]}
    chosen: list[tuple[object, ...]] = []
    while open_pairs:
        best = max(
            itertools.product(*factors.values()),
            key=lambda row: sum((a, row[a], b, row[b]) in open_pairs for a, b in pairs),
        )
        open_pairs -= {(a, best[a], b, best[b]) for a, b in pairs}
        chosen.append(best)
    return chosen


#: Shapes that also run on pages of 64 tokens.
LARGE_PAGES = ("dense", "no_attention", "next_moe")


def product(seeds: int) -> Iterator[Case]:
    """Everything: the whole product at page 4, ``seeds`` schedules each, and for a sample of shapes also at page 64."""
    for shape, *rest in itertools.product(*FACTORS.values()):
        for page, count in ((4, seeds), (64, shape in LARGE_PAGES)):
            for seed in range(count):
                yield Case(shape, *rest, page, seed)  # type: ignore[arg-type]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench parity", description="the whole parity product")
    parser.add_argument("--seeds", type=int, default=3, help="schedules per combination at page 4")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, cases, tally, mismatches = time.monotonic(), 0, Tally(), []
    by_shape: dict[str, dict[str, float]] = {}
    for shape, group in itertools.groupby(product(options.seeds), key=lambda case: case.shape):
        with tempfile.TemporaryDirectory() as directory:
            subject = Subject(shape, Path(directory))
        seen = Tally()
        for case in group:
            cases += 1
            try:
                seen.add(check_case(subject, case))
            except Mismatch as error:
                mismatches.append(str(error))
        tally.add(seen)
        by_shape[shape] = {
            "rows": seen.rows,
            "near_ties": seen.near_ties,
            "shaky": seen.shaky,
            "largest_difference": seen.largest,
        }
        print(f"{shape}: {seen.rows} rows, largest difference {seen.largest:.2e}", file=sys.stderr, flush=True)
    figures = {
        "what": "greedy tokens and logits against transformers; deterministic mode bit-equal to the cold run",
        "factors": FACTORS | {"page": tuple(LENGTHS), "lengths": LENGTHS, "outputs": OUTPUTS},
        "schedules": options.seeds,
        "threads": torch.get_num_threads(),
        "tolerance": TOLERANCE,
        "shaky_means": "differs by more than the tolerance, and so does transformers from itself with embeddings "
        "shaken by 1e-7",
        "cases": cases,
        "rows": tally.rows,
        "near_ties": tally.near_ties,
        "shaky": tally.shaky,
        "largest_difference": tally.largest,
        "mismatches": mismatches,
        "seconds": round(time.monotonic() - began, 1),
        "by_shape": by_shape,
    }
    path = record("parity", figures, sys.orig_argv, ("torch", "transformers"))
    print(f"{cases} cases, {tally.rows} rows, {len(mismatches)} mismatches: {path}", file=sys.stderr)
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
