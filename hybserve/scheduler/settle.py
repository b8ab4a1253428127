"""What came back from a step, told to the client's side: tokens as columns, and which choices ended by them.

A sampled token counts unless the plan is older than the sequence's present life (``live_from``): a sequence that ended
or was cancelled while its next step was already planned has overshot, and what it sampled there is nobody's.
"""

from dataclasses import dataclass

from hybserve.core.messages import PromptLogprobs, StepDone, Tokens
from hybserve.core.types import Ended, TokenLogprobs
from hybserve.scheduler.request import Request, Sequence
from hybserve.scheduler.step import Flight


@dataclass(slots=True)
class Outcome:
    """``tokens`` is None if no token counted. ``ended`` are choices that their last token ended."""

    tokens: Tokens | None
    ended: list[Sequence]
    scored: list[PromptLogprobs]


def broken(flight: Flight, done: StepDone) -> list[Request]:
    """Requests with a row that was not finite; what that row sampled is only a safe id."""
    requests = {}
    for entry in done.bad:
        sequence = flight.samplers[entry]
        if flight.plan.step >= sequence.live_from:
            requests[sequence.uid] = sequence.request
    return list(requests.values())


def settle(flight: Flight, done: StepDone) -> Outcome:
    """Append what was sampled to the outputs, and say what to tell."""
    step, stop, length = flight.plan.step, int(Ended.STOP), int(Ended.LENGTH)
    uids: list[int] = []
    choices: list[int] = []
    tokens: list[int] = []
    marks: list[int] = []
    kept: list[int] = []
    ended: list[Sequence] = []
    for entry, (sequence, token) in enumerate(zip(flight.samplers, done.tokens, strict=True)):
        if step < sequence.live_from:
            continue
        output = sequence.output
        output.append(token)
        mark = 0
        if token in sequence.stop_ids:
            mark = stop
        elif len(output) == sequence.max_tokens:
            mark = length
        if mark:
            ended.append(sequence)
        uids.append(sequence.uid)
        choices.append(sequence.choice)
        tokens.append(token)
        marks.append(mark)
        kept.append(entry)
    logprobs = [done.logprobs[entry] for entry in kept] if done.logprobs else []
    message = Tokens(uids, choices, tokens, marks, logprobs) if tokens else None
    return Outcome(message, ended, _scored(flight, done))


def _scored(flight: Flight, done: StepDone) -> list[PromptLogprobs]:
    """Prompt log-probabilities, each position once: what a recomputed prompt brings again is left out."""
    messages = []
    for row, entries in done.prompt_logprobs:
        sequence, first = flight.rows[row], flight.plan.starts[row] + 1
        if flight.plan.step < sequence.live_from:
            continue
        request = sequence.request
        new: list[TokenLogprobs] = entries[max(request.scored - first, 0) :]
        if new:
            assert first <= request.scored, "prompt log-probabilities came with a gap"
            messages.append(PromptLogprobs(request.uid, request.scored, new))
            request.scored += len(new)
    return messages
