"""Sampling over the vocabulary of Qwen3.5: the argmax alone, and every kind of row that wants more.

``SWEEP=1`` times every shape of launch in ``SHAPES`` too. The limit of a row of the table is one read of the logits.
"""

import os
import statistics
import time
from functools import partial

import torch
from hybserve_kernels.sampling import SamplingTable, gather_tokens, greedy_rows, logprob_rows, remember, sample_rows
from hybserve_kernels.sampling.gpu import greedy
from hybserve_kernels.sampling.gpu import sample as sampling

from bench.kernels import Row
from bench.kernels.timing import microseconds, rounds_of
from hybserve.core.messages import SequenceStart
from hybserve.core.sampling import SamplingParams
from hybserve.runner.sampler import sample
from hybserve.runner.sequences import Sequence

DEVICE = "cuda"
VOCAB = 248_320
SHAPES = [
    greedy.Shape(*shape)
    for shape in (
        (1024, 1024, 2), (1024, 1024, 4), (2048, 2048, 4), (2048, 2048, 8), (4096, 2048, 4), (4096, 2048, 8),
        (4096, 4096, 8), (8192, 2048, 4), (8192, 4096, 8), (16384, 4096, 8),
    )
]  # fmt: skip
SAMPLE_SHAPES = [
    sampling.Shape(*shape)
    for shape in ((4096, 16, 16), (4096, 16, 8), (4096, 8, 4), (2048, 8, 8), (2048, 4, 4), (8192, 16, 16))
]
KINDS = {
    "argmax": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=3),
    "top-k 20, top-p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=4),
    "top-k 1000": SamplingParams(top_k=1000, seed=6),
    "top-p 0.95": SamplingParams(top_p=0.95, seed=5),
    "min-p 0.05": SamplingParams(min_p=0.05, seed=7),
    "penalties, top-k 20": SamplingParams(top_k=20, repetition_penalty=1.1, presence_penalty=0.5, seed=8),
    "300 biases": SamplingParams(temperature=0.0, logit_bias=tuple((800 * k, 1.0) for k in range(300))),
}


def peaked(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A bulk, and forty tokens above it."""
    logits = 2.5 * torch.randn(rows, VOCAB, device=DEVICE)
    ids = torch.randint(0, VOCAB, (rows, 40), device=DEVICE)
    return logits.scatter_(1, ids, 10 + 8 * torch.rand(rows, 40, device=DEVICE)).to(dtype)


def flat(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, VOCAB, device=DEVICE).to(dtype)


def started(seq: int, params: SamplingParams, prompt: list[int]) -> Sequence:
    start = SequenceStart(
        seq=seq, epoch=0, choice=0, sampling=params, history=prompt, prompt_len=len(prompt), generated=0
    )
    return Sequence(start)


def check() -> None:
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            logits = flat(9, dtype)
            tokens, finite = greedy_rows(logits, shape)
            lowest = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)  # the first of the largest
            assert torch.equal(tokens, lowest), f"{shape} {dtype}"
            assert bool(finite.all())
    prompt = torch.randint(0, VOCAB, (2000,)).tolist()
    kinds = list(KINDS.values())
    for make in (peaked, flat):
        for dtype in (torch.bfloat16, torch.float32):
            rows = len(kinds)
            table = SamplingTable(rows, VOCAB, DEVICE)
            sequences = [started(seq, params, prompt) for seq, params in enumerate(kinds)]
            for seq, (sequence, params) in enumerate(zip(sequences, kinds, strict=True)):
                table.set(seq, params, sequence.stream, prompt)
            seqs = torch.arange(rows, dtype=torch.int32, device=DEVICE)
            for step in range(3):
                logits = make(rows, dtype)
                tokens, finite = sample_rows(logits, seqs, torch.full_like(seqs, step), table)
                expected = sample(logits.cpu(), sequences, [step] * rows).tokens
                assert tokens.tolist() == expected.tolist(), f"{make.__name__} {dtype} step {step}"
                assert bool(finite.all())
    _check_shapes(prompt)
    logprob_rows(flat(4), tokens[:4], 5)


def _check_shapes(prompt: list[int]) -> None:
    """Every shape of launch gives the same tokens."""
    logits, found = flat(len(KINDS)), []
    seqs = torch.arange(len(KINDS), dtype=torch.int32, device=DEVICE)
    for shape in [sampling.SHAPE, *(SAMPLE_SHAPES if os.environ.get("SWEEP") else [])]:
        table = SamplingTable(len(KINDS), VOCAB, DEVICE)
        for seq, params in enumerate(KINDS.values()):
            table.set(seq, params, 99, prompt)
        found.append(sample_rows(logits, seqs, seqs, table, shape)[0].tolist())
    assert all(tokens == found[0] for tokens in found), found


def measure() -> list[Row]:
    rows = []
    for count in (1, 8, 64, 256):
        shapes = SHAPES if os.environ.get("SWEEP") else []
        rows += [_argmax(count, shape, f"argmax {shape.piece}/{shape.block}/{shape.warps}w") for shape in shapes]
        rows.append(_argmax(count, greedy.SHAPE, "argmax alone"))
    for count in (1, 64, 256):
        for name, params in KINDS.items():
            rows.append(_sampled(count, name, params, "peaked"))
        rows.append(_sampled(count, "top-p 0.95", KINDS["top-p 0.95"], "flat"))
    rows.append(_sampled(64, "top-k 20, top-p 0.8", KINDS["top-k 20, top-p 0.8"], "flat"))
    for shape in SAMPLE_SHAPES if os.environ.get("SWEEP") else []:
        for name in ("argmax", "temperature", "top-p 0.95"):
            label = f"{name} {shape.piece}/{shape.survey_warps}/{shape.draw_warps}"
            rows.append(_sampled(64, name, KINDS[name], "peaked", shape)._replace(variant=label))
    for count in (256, 8192):
        ids = torch.randint(-1, 1000, (count,), dtype=torch.int32, device=DEVICE)
        seqs = torch.arange(count, dtype=torch.int32, device=DEVICE) % 256
        pool = torch.arange(256, device=DEVICE)
        rows.append(
            Row("sampling", f"T={count}", "gather_tokens", microseconds([partial(gather_tokens, ids, seqs, pool)]))
        )
    last = partial(remember, pool, seqs[:256], torch.arange(256, device=DEVICE))
    rows.append(Row("sampling", "R=256", "remember", microseconds([last])))
    rows += [
        _starts("no penalties", KINDS["top-p 0.95"], []),
        _starts("penalties, 2000", KINDS["penalties, top-k 20"], [7] * 2000),
    ]
    return rows


def _argmax(count: int, shape: greedy.Shape, name: str) -> Row:
    bytes_read = count * VOCAB * 2
    logits = [peaked(count) for _ in range(min(rounds_of(bytes_read), 24))]
    calls = [partial(greedy_rows, some, shape) for some in logits]
    return Row("sampling", f"R={count}", name, microseconds(calls, 10), bytes_read)


def _sampled(count: int, name: str, params: SamplingParams, what: str, shape: sampling.Shape = sampling.SHAPE) -> Row:
    bytes_read = count * VOCAB * 2
    logits = [(peaked if what == "peaked" else flat)(count) for _ in range(min(rounds_of(bytes_read), 24))]
    table = SamplingTable(count, VOCAB, DEVICE)
    for seq in range(count):
        table.set(seq, params, 77 + seq, list(range(0, 2000, 3)))
    seqs = torch.arange(count, dtype=torch.int32, device=DEVICE)
    outputs = torch.full_like(seqs, 5)
    calls = [partial(sample_rows, some, seqs, outputs, table, shape) for some in logits]
    return Row("sampling", f"R={count} {what}", name, microseconds(calls, 5), bytes_read)


def _starts(name: str, params: SamplingParams, prompt: list[int]) -> Row:
    """Host time of a sequence's start."""
    table = SamplingTable(8, VOCAB, DEVICE, counts=True)
    times = []
    for turn in range(50):
        begin = time.perf_counter()
        table.set(turn % 8, params, 5, prompt)
        times.append((time.perf_counter() - begin) * 1e6)
    return Row("sampling", "start, host", name, statistics.median(times))
