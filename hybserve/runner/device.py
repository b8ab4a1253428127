"""Steps through the Triton forms: launched when the plan comes, collected when its results are there.

Everything is put on one stream and nothing waits for the device between launch and collection, so the plan after the
running one is written, sent and queued while the device works. A step is three parts:

    before   new pages into the block tables, copies of pages and states        launched one by one, if there are any
    body     token ids, all layers, hidden states of the sampled rows gathered   one captured graph, by shape
             (of the last layer only what the last token of every row needs, unless the prompt is scored)
    head     logits, the likeliest token of each row, the token pool            one captured graph, by number of rows

and after them what few steps need: other sampling than the plain argmax, log-probabilities, checkpoints of decode rows.
Sampled tokens stay on the device; the host's copy follows.

Legend: T packed tokens, R sampled rows, S sequences, M pages of a block table, D model dim, C vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from hybserve_kernels.compiling import compiled_ahead
from hybserve_kernels.copies import SlotCells, copy_runs, runs_finite
from hybserve_kernels.rows import TILE, DeviceStep
from hybserve_kernels.sampling import gather_tokens, greedy_rows, logprob_rows, remember

from hybserve.core.messages import SequenceStart, StepPlan
from hybserve.core.types import TokenLogprobs
from hybserve.layers.step_context import StepContext
from hybserve.models.base import Model
from hybserve.plan.costs import LOGITS_SLICE
from hybserve.plan.result import EngineLimits
from hybserve.runner.device_pools import DevicePools, torch_dtype
from hybserve.runner.execute import Outcome, scored_rows
from hybserve.runner.graphs import Graphs, buckets_of, exact_room, graph_rooms
from hybserve.runner.inputs import exports_of
from hybserve.runner.sampling import DeviceSampler, to_logprobs
from hybserve.runner.sequences import Sequence, Sequences
from hybserve.runner.staging import Lists, Shape, Staging, Step, make_step

#: Results on their way to the host: as many steps as may be in flight, and one that is being read.
_RESULTS = 4


@dataclass(slots=True)
class _Results:
    """Where one step's results arrive on the host; pinned."""

    tokens: torch.Tensor
    finite: torch.Tensor
    exports: torch.Tensor
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Launched:
    """A step on the device: what is needed to tell its outcome."""

    plan: StepPlan
    results: _Results
    logprobs: list[tuple[list[int], list[int], tuple[torch.Tensor, ...]]] = field(default_factory=list)
    scored: list[tuple[int, list[int], tuple[torch.Tensor, ...]]] = field(default_factory=list)


class DeviceExecutor:
    """One rank's device: its stream of steps, from captured graphs where there is one (CUDA only)."""

    def __init__(
        self,
        model: Model,
        pools: DevicePools,
        sequences: Sequences,
        staging: Staging,
        limits: EngineLimits,
        vocab: int,
        device: torch.device,
    ) -> None:
        self._model, self._pools, self._sequences, self._staging = model, pools, sequences, staging
        self._limits, self._vocab, self._device = limits, vocab, device
        self._cells = _cells_of(pools)
        running, dtype = limits.max_running, model.dtype
        self._tables_SM = torch.zeros(running, staging.table_width, dtype=torch.int32, device=device)
        self._last_token_S = torch.zeros(running, dtype=torch.int64, device=device)
        self._head_in_RD = torch.zeros(running, model.spec.hidden, dtype=dtype, device=device)
        self._tokens_R = torch.zeros(running, dtype=torch.int64, device=device)
        self._finite_R = torch.zeros(running, dtype=torch.bool, device=device)
        self._sampler = DeviceSampler(running, vocab, device)
        self._bodies: Graphs[Shape] = Graphs(device)
        self._heads: Graphs[int] = Graphs(device)
        self._results = [self._make_results() for _ in range(_RESULTS)]
        self._launches = 0

    def _make_results(self) -> _Results:
        pinned, running = self._device.type == "cuda", self._limits.max_running
        exports = self._limits.step_tokens // self._limits.page_size + 2 * running
        return _Results(
            torch.zeros(running, dtype=torch.int64, pin_memory=pinned),
            torch.zeros(running, dtype=torch.bool, pin_memory=pinned),
            torch.zeros(exports, dtype=torch.bool, pin_memory=pinned),
            torch.cuda.Event(enable_timing=True) if pinned else None,  # type: ignore[no-untyped-call]
            torch.cuda.Event(enable_timing=True) if pinned else None,  # type: ignore[no-untyped-call]
        )

    @property
    def cuda(self) -> bool:
        return self._device.type == "cuda"

    # start

    def compile(self) -> None:
        """Compile what the usual steps need, many kernels at a time: before anything is launched."""
        rows = buckets_of(self._limits.max_running)
        shapes = {(shape.tokens, shape.prefill_rows > 0): shape for shape in self._usual_shapes(rows)}
        lone = self._largest._replace(decode_rows=0, prefill_rows=1, last=1)  # there are forms for one row alone
        lones = [lone._replace(tokens=tokens, tiles=tokens // TILE) for tokens in self._lengths]
        with compiled_ahead():
            for shape in (self._largest, *shapes.values(), *lones):
                tokens_T, seqs_T, step = self._staging.views(shape, self._tables_SM)
                gather_tokens(tokens_T, seqs_T, self._last_token_S)
                self._model.rehearse(step.positions_T.new_zeros(shape.tokens), self._context(step))
            for count in rows:
                self._sampler.rehearse(self._head(count))
            self._rehearse_copies()

    def _rehearse_copies(self) -> None:
        pairs_X2 = self._staging.device_words[:2].view(1, 2)
        self._copy(pairs_X2, pairs_X2)
        if self._pools.slots.shape[1]:
            runs_finite(self._pools.slots, self._staging.device_words[:1], self._cells)

    def capture(self) -> None:
        """Capture the graphs of every usual step."""
        self._staging.send_empty(self._largest)
        self._body(self._largest)  # the most that a step ever takes
        self._head(self._limits.max_running)
        if not self._limits.graphs:
            return
        rows = buckets_of(self._limits.max_running)
        for count in reversed(rows):
            self._heads.capture(count, self._head)
        for shape in self._usual_shapes(rows):
            self._staging.send_empty(shape)
            self._bodies.capture(shape, self._body)

    @property
    def _lengths(self) -> list[int]:
        """Tokens of a step with one row, two of every order of magnitude: kernels are made for ranges of them."""
        most = self._limits.step_tokens // TILE * TILE
        powers = range(most.bit_length())
        return [most, *(length for power in powers for length in (TILE << power, 3 * TILE << power) if length < most)]

    @property
    def _largest(self) -> Shape:
        limits, running = self._limits, self._limits.max_running
        tiles = limits.step_tokens // TILE + running
        return Shape(limits.step_tokens, running, running, tiles, self._staging.table_width, running)

    def _usual_shapes(self, rows: list[int]) -> list[Shape]:
        """Largest first: the graphs share one pool of memory."""
        return graph_rooms(self._limits, self._staging.table_width, rows)

    # steps

    def launch(self, plan: StepPlan, starts: Iterable[SequenceStart]) -> Callable[[], Outcome]:
        """Put a step on the device; the call returned waits for it. ``Sequences.forget`` comes first."""
        places, pages = self._sequences.begin(plan, starts)
        results = self._results[self._launches % _RESULTS]
        self._launches += 1
        if results.begun is not None:
            results.begun.record()
        launched = _Launched(plan, results)
        if plan.seqs:
            self._step(make_step(plan, places, pages), launched)
        else:
            self._copies_only(plan)
        if results.done is not None:
            results.done.record()
        return lambda: self._collect(launched)

    def _step(self, step: Step, launched: _Launched) -> None:
        plan, limits = step.plan, self._limits
        scored = any(True for _ in scored_rows(plan, step.packed, self._sequences))
        shape = exact_room(step.shape(limits, scored), limits, self._staging.table_width)
        if not scored:
            shape = self._bodies.room_for(shape) or shape
        lists = self._staging.send(step, shape, self._sequences)
        self._before(lists)
        hidden_TD = self._bodies.run(shape, self._body)
        if scored:
            self._score(step, hidden_TD, launched)
        if plan.sample_rows:
            self._sample(plan, launched)
        if plan.export_slots:
            self._export(lists, launched.results)

    def _before(self, lists: Lists) -> None:
        if len(lists.table_places):
            self._tables_SM.view(-1).scatter_(0, lists.table_places.long(), lists.table_pages)
        self._copy(lists.state_copies_X2, lists.page_copies_X2)

    def _copy(self, states_X2: torch.Tensor, pages_X2: torch.Tensor) -> None:
        for runs, pairs_X2 in ((self._pools.slots, states_X2), (self._pools.pages, pages_X2)):
            if len(pairs_X2) and runs.shape[1]:
                copy_runs(runs, pairs_X2)

    def _copies_only(self, plan: StepPlan) -> None:
        states, pages = (
            torch.tensor(pairs, dtype=torch.int32).view(-1, 2).to(self._device)
            for pairs in (plan.state_copies, plan.page_copies)
        )
        self._copy(states, pages)

    def _body(self, shape: Shape) -> torch.Tensor:
        tokens_T, seqs_T, step = self._staging.views(shape, self._tables_SM)
        ids_T = gather_tokens(tokens_T, seqs_T, self._last_token_S)
        hidden_TD = self._model.forward(ids_T, self._context(step))
        torch.index_select(hidden_TD, 0, self._staging.sample_at, out=self._head_in_RD)
        return hidden_TD

    def _context(self, step: DeviceStep) -> StepContext:
        pools = self._pools
        return StepContext.of_step(step, self._limits.page_size, pools.kv_layers, pools.matrices, pools.windows)

    def _head(self, rows: int) -> torch.Tensor:
        logits_RC = self._model.logits_rows(self._head_in_RD[:rows])
        tokens_R, finite_R = greedy_rows(logits_RC)
        self._keep(tokens_R, finite_R)
        return logits_RC

    def _keep(self, tokens_R: torch.Tensor, finite_R: torch.Tensor) -> None:
        rows = len(tokens_R)
        self._tokens_R[:rows].copy_(tokens_R)
        self._finite_R[:rows].copy_(finite_R)
        remember(self._last_token_S, self._staging.sample_seqs[:rows], tokens_R)

    def _sample(self, plan: StepPlan, launched: _Launched) -> None:
        rows = len(plan.sample_rows)
        room = self._heads.room_for(rows) or rows
        logits_RC = self._heads.run(room, self._head)[:rows]
        sequences = [self._sequences[seq] for seq in plan.sample_seqs]
        staging, results = self._staging, launched.results
        if not all(sequence.plain_draw for sequence in sequences):
            tokens_R, finite_R = self._sampler.sample(
                logits_RC, plan.sample_seqs, sequences, staging.sample_seqs[:rows], staging.sample_outputs[:rows]
            )
            self._keep(tokens_R, finite_R)
        self._logprobs(logits_RC, sequences, launched)
        results.tokens[:rows].copy_(self._tokens_R[:rows], non_blocking=True)
        results.finite[:rows].copy_(self._finite_R[:rows], non_blocking=True)

    def _logprobs(self, logits_RC: torch.Tensor, sequences: list[Sequence], launched: _Launched) -> None:
        asking = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs >= 0]
        if asking:
            tops = [sequences[row].sampling.logprobs for row in asking]
            at = torch.tensor(asking, device=self._device)
            scores = logprob_rows(logits_RC[at], self._tokens_R[at], max(tops))
            launched.logprobs.append((asking, tops, scores))

    def _score(self, step: Step, hidden_TD: torch.Tensor, launched: _Launched) -> None:
        """Log-probabilities of prompt tokens, in slices of the vocabulary's size."""
        height = max(1, LOGITS_SLICE // self._vocab)
        for row, first, end, successors, top in scored_rows(step.plan, step.packed, self._sequences):
            for low in range(first, end, height):
                high = min(end, low + height)
                logits_RC = self._model.logits_rows(hidden_TD[low:high])
                tokens_R = torch.tensor(successors[low - first : high - first], device=self._device)
                scores = logprob_rows(logits_RC, tokens_R, top)
                launched.scored.append((row, [top] * (high - low), scores))

    def _export(self, lists: Lists, results: _Results) -> None:
        if not self._pools.slots.shape[1]:  # no recurrent layer on this rank
            results.exports[: len(lists.exported_X)] = True
            return
        if len(lists.state_exports_X2):
            copy_runs(self._pools.slots, lists.state_exports_X2)
        finite_X = runs_finite(self._pools.slots, lists.exported_X, self._cells)
        results.exports[: len(finite_X)].copy_(finite_X, non_blocking=True)

    # results

    def _collect(self, launched: _Launched) -> Outcome:
        plan, results = launched.plan, launched.results
        if results.done is not None:
            results.done.synchronize()
        rows = len(plan.sample_rows)
        tokens = results.tokens[:rows].tolist()
        finite = results.finite[:rows].tolist()
        bad = [row for row, sound in enumerate(finite) if not sound] if not all(finite) else []
        logprobs: list[TokenLogprobs | None] = []
        for asking, tops, scores in launched.logprobs:
            logprobs = [None] * rows
            for row, entry in zip(asking, to_logprobs(scores, tops), strict=True):
                logprobs[row] = entry
        prompts: dict[int, list[TokenLogprobs]] = {}
        for row, tops, scores in launched.scored:
            prompts.setdefault(row, []).extend(to_logprobs(scores, tops))
        exports = list(exports_of(plan))
        positions = [plan.starts[row] + count for row, count, _ in exports]
        sound = results.exports[: len(exports)].tolist()
        return Outcome(tokens, bad, logprobs, list(prompts.items()), positions, sound, self._elapsed(results))

    def _elapsed(self, results: _Results) -> float | None:
        """Milliseconds on the device."""
        if results.begun is None or results.done is None:
            return None
        return float(results.begun.elapsed_time(results.done))


def _cells_of(pools: DevicePools) -> SlotCells:
    """Where the floats of a slot lie."""
    layout = pools.slot_layout
    state, conv = torch_dtype(layout.state_dtype), torch_dtype(layout.conv_dtype)
    return SlotCells(
        layers=layout.layers,
        layer_bytes=layout.layer_bytes,
        matrix_bytes=layout.value_heads * layout.key_dim * layout.value_dim * state.itemsize,
        state_dtype=state,
        window_offset=layout.window_offset,
        window_bytes=layout.channels * layout.window * conv.itemsize,
        conv_dtype=conv,
    )
