"""The runner of one rank: frames of plans in, frames of results out."""

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from hybserve_kernels.compiling import compilers_at_hand

from hybserve.config.deployment import Deployment
from hybserve.core.errors import ModelError
from hybserve.core.messages import FromRunner, SequenceStart, StepDone, StepFailed, StepPlan, Stop, ToRunner
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import SAMPLED
from hybserve.models.base import Model as LayeredModel
from hybserve.models.load import Progress, dummy_weights, load_weights
from hybserve.models.registry import build_model
from hybserve.observe.stages import Stages
from hybserve.plan.facts import probe_gpu
from hybserve.plan.floors import pages_of
from hybserve.plan.result import EngineLimits
from hybserve.runner.device import DeviceExecutor
from hybserve.runner.device_pools import DevicePools, torch_dtype
from hybserve.runner.execute import Model, Outcome, Rank, run_step
from hybserve.runner.memory import Measured, measure
from hybserve.runner.sequences import Sequences
from hybserve.runner.staging import Staging
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.split import RankShare, split_ranks
from hybserve.wire.codec import Codec

log = logging.getLogger("hybserve.runner")

T = TypeVar("T")


class Runner:
    """Executes plans in the order of their frames, one per ``collect``. A model that computes through the Triton forms
    is launched when a plan comes, so that the device always has the next step; others compute when it is collected.

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
        free_before: int | None = None,
    ) -> None:
        self.pools = DevicePools(spec, share, limits, device, poisoned=poison)
        self.sequences = Sequences(device, pages_of(limits.max_seq_len, limits.page_size))
        self.stopped = False
        self._rank = Rank(model, self.pools, self.sequences, limits, spec.vocab_size)
        self._device: DeviceExecutor | None = None
        if isinstance(model, LayeredModel) and model.triton:
            place = torch.device(device)
            staging = Staging(limits, place)
            self._device = DeviceExecutor(model, self.pools, self.sequences, staging, limits, spec.vocab_size, place)
        self._free_before = free_before
        self._epoch = epoch
        self._poison = poison
        self._last_step = 0
        self._queue: deque[Callable[[], StepDone | StepFailed]] = deque()
        self._starts: list[SequenceStart] = []
        self._decoder: Codec[ToRunner] = Codec(ToRunner)
        self._encoder: Codec[FromRunner] = Codec(FromRunner)

    @property
    def pending(self) -> int:
        """Plans submitted and not collected."""
        return len(self._queue)

    def measured(self) -> Measured:
        """What this rank really allocated; ``memory.drift`` puts it beside the plan."""
        return measure(self._rank.model.params, self.pools, self._free_before)

    # start: compile, then weights, then capture, then warm_up

    def compile(self) -> None:
        """Have the kernels compiled that the usual steps need; no weight has to be there. Nothing on CPU."""
        if self._device is not None and self._device.cuda:
            with torch.inference_mode():
                self._device.compile()

    def capture(self) -> None:
        """Capture the graphs of the usual steps, where steps run from graphs."""
        if self._device is not None:
            with torch.inference_mode():
                self._device.capture()

    def warm_up(self) -> None:
        """Prefill, decode and sample once on a page and a slot that nobody has yet, and forget it.

        Raises ModelError if the logits are not finite: the weights cannot be served in this dtype.
        """
        params = SamplingParams(top_p=0.9, logprobs=1)
        start = SequenceStart(0, self._epoch, 0, params, [], 2, 0)
        tokens = [0, min(1, self._rank.vocab - 1)]
        prefill = StepPlan(0, self._epoch, [0], [0], [2], [1], tokens, [0, 0], [1, 1], [0], [0], [0], *_none(5))
        decode = StepPlan(0, self._epoch, [0], [2], [1], [1], [SAMPLED], [0], [1], [0], [0], [1], *_none(5))
        bad = self._launch(prefill, [start])().bad + self._launch(decode, [])().bad
        self.sequences.clear()
        if bad:
            raise ModelError("the model's logits are not finite; try model.dtype: bfloat16 or float32")

    def submit(self, frame: bytes) -> None:
        """Queue the plans of a frame. Raises FrameError if the bytes are not a frame for a runner."""
        for message in self._decoder.decode(frame):
            if isinstance(message, SequenceStart):
                self._starts.append(message)
            elif isinstance(message, StepPlan):
                self._queue.append(self._take(message, self._starts))
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
        return self._encoder.encode([self._queue.popleft()()])

    def _take(self, plan: StepPlan, starts: list[SequenceStart]) -> Callable[[], StepDone | StepFailed]:
        """What gives the plan's result when it is its turn."""
        stale = self._refusal(plan, starts)
        if stale is not None:
            return lambda: StepFailed(plan.step, plan.epoch, [], stale)
        self._last_step = plan.step
        run = self._guarded(plan, lambda: self._launch(plan, starts))
        if self._device is None:
            return lambda: self._finish(plan, run())
        launched = run()
        return lambda: self._finish(plan, launched)

    def _finish(self, plan: StepPlan, run: Callable[[], StepDone] | StepFailed) -> StepDone | StepFailed:
        return run if isinstance(run, StepFailed) else self._guarded(plan, run)()

    def _guarded(self, plan: StepPlan, call: Callable[[], T]) -> Callable[[], T | StepFailed]:
        """The call, with whatever it raises turned into the failure of the step."""

        def run() -> T | StepFailed:
            try:
                return call()
            except Exception:
                log.exception("step %d failed: %d rows, %d tokens", plan.step, len(plan.seqs), len(plan.tokens))
                reason = f"the forward of step {plan.step} failed; the engine's log has the cause"
                return StepFailed(plan.step, plan.epoch, [], reason)

        return run

    def _refusal(self, plan: StepPlan, starts: list[SequenceStart]) -> str | None:
        for epoch in (plan.epoch, *(start.epoch for start in starts)):
            if epoch != self._epoch:
                return f"step {plan.step} is of layout epoch {epoch}, this rank is at {self._epoch}"
        if plan.step <= self._last_step:
            return f"step {plan.step} comes after step {self._last_step}"
        return None

    def _launch(self, plan: StepPlan, starts: list[SequenceStart]) -> Callable[[], StepDone]:
        """Start a plan; the call returned waits for its result."""
        freed = self.sequences.forget(plan.freed)
        if self._poison and freed:
            pages, slots = self.sequences.unreachable(freed, plan)
            self.pools.poison_pages(pages)
            self.pools.poison_slots(slots)
        with torch.inference_mode():
            if self._device is not None:
                collect = self._device.launch(plan, starts)
                return lambda: _done(plan, collect(), 0.0)
            began = time.perf_counter()
            self.sequences.begin(plan, starts)
            outcome = run_step(plan, self._rank)
        elapsed = (time.perf_counter() - began) * 1e3
        return lambda: _done(plan, outcome, elapsed)


def _done(plan: StepPlan, outcome: Outcome, elapsed: float) -> StepDone:
    tokens, bad, logprobs, prompt_logprobs, positions, finite, measured = outcome
    forward_ms = elapsed if measured is None else measured
    return StepDone(plan.step, plan.epoch, tokens, bad, logprobs, prompt_logprobs, forward_ms, positions, finite)


def _none(columns: int) -> list[list[int]]:
    return [[] for _ in range(columns)]


def build_runner(
    deployment: Deployment,
    spec: ModelSpec,
    limits: EngineLimits,
    model_dir: Path,
    progress: Progress | None = None,
    stages: Stages | None = None,
) -> Runner:
    """The one rank of this version: model built, pools allocated, weights loaded, graphs captured, two steps run.

    Kernels are compiled by processes of their own, forked before CUDA is initialised, while the weights are loaded.
    Raises ModelError for weights that cannot be served. ``progress(done, total)`` counts bytes of weights.
    """
    stages = stages or Stages()
    share = split_ranks(spec)[0]
    free_before = probe_gpu() if limits.cuda else None
    asked = deployment.model.dtype
    device = "cuda" if limits.cuda else "cpu"
    with compilers_at_hand() if limits.cuda else nullcontext():
        model = build_model(spec, share, torch_dtype(spec.dtype if asked == "auto" else asked), device)
        stages.lap("model")
        runner = Runner(model, spec, share, limits, device=device, free_before=free_before)
        stages.lap("pools")
        runner.compile()
        stages.lap("rehearsal")
        if deployment.model.load == "dummy":
            dummy_weights(model.params, deployment.model.seed)
        else:
            load_weights(model_dir, spec, share, model.params, progress)
        model.bind()
        _wait_for(device)
        stages.lap("weights")
    stages.lap("compile")
    runner.capture()
    _wait_for(device)
    stages.lap("graphs")
    runner.warm_up()
    stages.lap("first steps")
    return runner


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
