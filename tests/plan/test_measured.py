"""The transients that the planner counts, against what a step of the CPU runner really allocates (peer61)."""

from operator import itemgetter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybserve.core.messages import SequenceStart, StepPlan
from hybserve.core.sampling import SamplingParams
from hybserve.models.registry import build_model
from hybserve.runner.device_pools import DevicePools
from hybserve.runner.execute import Rank, run_step
from hybserve.runner.sequences import Sequences
from hybserve.spec.split import split_ranks

SAMPLING = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.5, logprobs=5, prompt_logprobs=5
)


def peak_of(work):
    """Most bytes that lived at one time beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    events = [
        (event.start_ns(), event.nbytes())
        for event in prof.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    now = most = 0
    for _, count in sorted(events, key=itemgetter(0)):
        now += count
        most = max(most, now)
    return most


class Bench:
    """Sequences of one rank that hold ``lengths`` tokens, as after many steps."""

    def __init__(self, spec, limits):
        torch.manual_seed(0)
        (share,) = split_ranks(spec)
        model = build_model(spec, share, getattr(torch, spec.dtype))
        for tensor in model.params.values():
            tensor.normal_(0, 0.02)
        self.rank = Rank(model, DevicePools(spec, share, limits), Sequences(), limits, spec.vocab_size)
        self.rank.pools.pages.zero_()
        self.rank.pools.slots.zero_()
        self.limits, self.pages = limits, list(range(1, limits.kv_pages))

    def step(self, starts, counts, shared=False):
        """``shared``: all rows lie on the same pages, as after a prefix hit."""
        rows, page = len(starts), self.limits.page_size
        spans = [-(-(start + count) // page) for start, count in zip(starts, counts, strict=True)]
        if shared:
            one = [self.pages.pop() for _ in range(max(spans))]
            taken = [one[:span] for span in spans]
        else:
            taken = [[self.pages.pop() for _ in range(span)] for span in spans]
        plan = StepPlan(
            step=1, epoch=0, seqs=list(range(rows)), starts=starts, counts=counts, slots=list(range(1, rows + 1)),
            tokens=[7] * sum(counts), page_rows=[row for row, ids in enumerate(taken) for _ in ids],
            page_ids=[page for ids in taken for page in ids], sample_rows=list(range(rows)),
            sample_seqs=list(range(rows)), sample_outputs=[3] * rows, state_copies=[], page_copies=[], fork_seqs=[],
            fork_pages=[], freed=[],
        )  # fmt: skip
        prompt = [index % 97 for index in range(max(starts) + max(counts))]
        self.rank.sequences.begin(
            plan, [SequenceStart(seq, 0, 0, SAMPLING, prompt, len(prompt), 0) for seq in range(rows)]
        )
        with torch.inference_mode():
            measured = peak_of(lambda: run_step(plan, self.rank))
        self.pages += one if shared else [page for ids in taken for page in ids]
        self.rank.sequences.clear()
        return measured


def steps(limits):
    """The extremes: every row decodes at the end of what the pool holds; a full step of fresh prompts; a chunk at the
    end of the longest sequence beside decoding rows; all rows at the end of the longest sequence, on shared pages."""
    page, rows = limits.page_size, limits.max_running
    each = min(limits.max_seq_len, (limits.kv_pages - 1) // rows * page)
    prompts = limits.step_tokens // limits.prefill_chunk
    last = limits.max_seq_len - limits.prefill_chunk
    others = min(rows - 1, limits.step_tokens - limits.prefill_chunk)
    rest = ((limits.kv_pages - 1) - limits.max_seq_len // page) // max(1, others) * page
    return {
        "decode": ([each - 1] * rows, [1] * rows),
        "prompts": ([0] * prompts, [limits.prefill_chunk] * prompts),
        "mixed": ([last] + [min(rest, each) - 1] * others, [limits.prefill_chunk] + [1] * others),
        "shared decode": ([limits.max_seq_len - 1] * rows, [1] * rows, True),
        "shared chunks": ([last] * prompts, [limits.prefill_chunk] * prompts, True),
    }


@pytest.mark.parametrize(
    ("mixers", "dtype", "mlp"),
    [
        ("ddda", "float32", "dense"),
        ("ddda", "bfloat16", "moe"),
        ("dd", "float32", "dense"),
        ("aa", "bfloat16", "dense"),
    ],
)
def test_peer61_a_step_stays_within_what_was_planned(make_spec, plan_of, mixers, dtype, mlp):
    torch.set_num_threads(1)
    spec = make_spec(mixers, mlp, dtype, 2048, D=128, F=384, C=4096, H=8, J=2, d=32, I=4, U=8, K=32, V=32)
    stated = {"engine.max_running": 8, "engine.max_seq_len": 2048, "engine.step_tokens": 512, "cache.prefix": False}
    got = plan_of(spec, "1GiB", **stated)
    bench = Bench(spec, got.engine)
    assert got.engine.prefill_chunk < got.engine.step_tokens
    planned = got.stages[0].transient_bytes
    measured = {name: bench.step(*rows) for name, rows in steps(got.engine).items()}
    assert max(measured.values()) <= planned, (measured, planned)
    assert planned <= 8 * max(measured.values()), (measured, planned)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peer61_rows_that_share_pages_gather_no_more_than_one_alone(make_spec, plan_of, dtype):
    torch.set_num_threads(1)
    spec = make_spec("aaaa", "dense", dtype, 4096, D=32, F=32, C=128, H=8, J=4, d=64)
    stated = {"engine.max_running": 32, "engine.max_seq_len": 4096, "engine.step_tokens": 64, "cache.prefix": False}
    got = plan_of(spec, "1GiB", **stated)
    peaks = {}
    for rows in (1, 32):
        bench = Bench(spec, got.engine)
        peaks[rows] = bench.step([4095] * rows, [1] * rows, shared=True)
    assert peaks[32] < 1.2 * peaks[1]
    assert peaks[32] <= got.stages[0].transient_bytes
