"""The runner of one rank: frames of plans in, frames of results out."""

import logging
import time
from collections import deque
from pathlib import Path

import torch

from hybserve.config.deployment import Deployment
from hybserve.core.errors import ModelError
from hybserve.core.messages import FromRunner, SequenceStart, StepDone, StepFailed, StepPlan, Stop, ToRunner
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import SAMPLED
from hybserve.models.load import Progress, dummy_weights, load_weights
from hybserve.models.registry import build_model
from hybserve.plan.result import EngineLimits
from hybserve.runner.device_pools import DevicePools, torch_dtype
from hybserve.runner.execute import Model, Rank, run_step
from hybserve.runner.memory import Measured, measure
from hybserve.runner.sequences import Sequences
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import RankShare, split_ranks
from hybserve.wire.codec import Codec

log = logging.getLogger("hybserve.runner")


class Runner:
    """Executes plans in the order of their frames, one per ``collect``.

    ``poison``: freed pages and slots are overwritten with NaN and all start so (tests and debugging); whatever still
    reads them then shows at once.
    """

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        share: RankShare,
        limits: EngineLimits,
        epoch: int = 1,
        device: str = "cpu",
        poison: bool = False,
    ) -> None:
        self.pools = DevicePools(spec, share, limits, device, poisoned=poison)
        self.sequences = Sequences(device)
        self.stopped = False
        self._rank = Rank(model, self.pools, self.sequences, limits, spec.vocab_size)
        self._epoch = epoch
        self._poison = poison
        self._last_step = 0
        self._queue: deque[tuple[StepPlan, list[SequenceStart]]] = deque()
        self._starts: list[SequenceStart] = []
        self._decoder: Codec[ToRunner] = Codec(ToRunner)
        self._encoder: Codec[FromRunner] = Codec(FromRunner)

    @property
    def pending(self) -> int:
        """Plans submitted and not collected."""
        return len(self._queue)

    def measured(self) -> Measured:
        """What this rank really allocated; ``memory.drift`` puts it beside the plan."""
        return measure(self._rank.model.params, self.pools)

    def warm_up(self) -> None:
        """Prefill, decode and sample once on a page and a slot that nobody has yet, and forget it.

        Raises ModelError if the logits are not finite: the weights cannot be served in this dtype.
        """
        params = SamplingParams(top_p=0.9, logprobs=1)
        start = SequenceStart(0, self._epoch, 0, params, [], 2, 0)
        tokens = [0, min(1, self._rank.vocab - 1)]
        prefill = StepPlan(0, self._epoch, [0], [0], [2], [1], tokens, [0, 0], [1, 1], [0], [0], [0], *_none(5))
        decode = StepPlan(0, self._epoch, [0], [2], [1], [1], [SAMPLED], [0], [1], [0], [0], [1], *_none(5))
        bad = self._run(prefill, [start]).bad + self._run(decode, []).bad
        self.sequences.clear()
        if bad:
            raise ModelError("the model's logits are not finite; try model.dtype: bfloat16 or float32")

    def submit(self, frame: bytes) -> None:
        """Queue the plans of a frame. Raises FrameError if the bytes are not a frame for a runner."""
        for message in self._decoder.decode(frame):
            if isinstance(message, SequenceStart):
                self._starts.append(message)
            elif isinstance(message, StepPlan):
                self._queue.append((message, self._starts))
                self._starts = []
            else:
                self._stop(message)

    def _stop(self, message: Stop) -> None:
        self._queue.clear()
        self._starts = []
        self.sequences.clear()
        self.stopped = True

    def collect(self) -> bytes:
        """Execute the oldest plan and return its frame: one StepDone or one StepFailed."""
        plan, starts = self._queue.popleft()
        stale = self._refusal(plan, starts)
        if stale is not None:
            return self._encoder.encode([StepFailed(plan.step, plan.epoch, [], stale)])
        self._last_step = plan.step
        try:
            return self._encoder.encode([self._run(plan, starts)])
        except Exception:
            log.exception("step %d failed: %d rows, %d tokens", plan.step, len(plan.seqs), len(plan.tokens))
            reason = f"the forward of step {plan.step} failed; the engine's log has the cause"
            return self._encoder.encode([StepFailed(plan.step, plan.epoch, [], reason)])

    def _refusal(self, plan: StepPlan, starts: list[SequenceStart]) -> str | None:
        for epoch in (plan.epoch, *(start.epoch for start in starts)):
            if epoch != self._epoch:
                return f"step {plan.step} is of layout epoch {epoch}, this rank is at {self._epoch}"
        if plan.step <= self._last_step:
            return f"step {plan.step} comes after step {self._last_step}"
        return None

    def _run(self, plan: StepPlan, starts: list[SequenceStart]) -> StepDone:
        began = time.perf_counter()
        freed = self.sequences.forget(plan.freed)
        if self._poison and freed:
            pages, slots = self.sequences.unreachable(freed, plan)
            self.pools.poison_pages(pages)
            self.pools.poison_slots(slots)
        self.sequences.begin(plan, starts)
        with torch.inference_mode():
            tokens, bad, logprobs, prompt_logprobs, positions, finite = run_step(plan, self._rank)
        elapsed = (time.perf_counter() - began) * 1e3
        return StepDone(plan.step, plan.epoch, tokens, bad, logprobs, prompt_logprobs, elapsed, positions, finite)


def _none(columns: int) -> list[list[int]]:
    return [[] for _ in range(columns)]


def build_runner(
    deployment: Deployment,
    spec: ModelSpec,
    limits: EngineLimits,
    model_dir: Path,
    progress: Progress | None = None,
) -> Runner:
    """The one rank of this version: model built, weights loaded, pools allocated, one step run.

    Raises ModelError for weights that cannot be served. ``progress(done, total)`` counts bytes of weights.
    """
    share = split_ranks(spec)[0]
    asked = deployment.model.dtype
    model = build_model(spec, share, torch_dtype(spec.dtype if asked == "auto" else asked), "cpu")
    if deployment.model.load == "dummy":
        dummy_weights(model.params, deployment.model.seed)
    else:
        load_weights(model_dir, spec, share, model.params, progress)
    runner = Runner(model, spec, share, limits)
    runner.warm_up()
    return runner
