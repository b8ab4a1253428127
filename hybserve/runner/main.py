"""The runner of one rank: frames of plans in, frames of results out."""

import logging
import time
from collections import deque

import torch

from hybserve.core.messages import FromRunner, SequenceStart, StepDone, StepFailed, StepPlan, Stop, ToRunner
from hybserve.plan.result import EngineLimits
from hybserve.runner.device_pools import DevicePools
from hybserve.runner.execute import Model, Rank, run_step
from hybserve.runner.sequences import Sequences
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import RankShare, width
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
        self._rank = Rank(model, self.pools, self.sequences, limits, width(share.vocab))
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
            tokens, bad, logprobs, prompt_logprobs = run_step(plan, self._rank)
        elapsed = (time.perf_counter() - began) * 1e3
        return StepDone(plan.step, plan.epoch, tokens, bad, logprobs, prompt_logprobs, elapsed)
