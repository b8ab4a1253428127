"""Who is refused at the door, and what a waiting group must find free to be let in. Pure arithmetic.

Admission is all-or-nothing: a group gets what its first step needs, or touches nothing and waits.
"""

import math

from hybserve.core.errors import (
    RequestError,
    context_length_exceeded,
    exceeds_capacity,
    invalid_value,
    queue_full,
    unavailable,
)
from hybserve.core.messages import Generate
from hybserve.plan.floors import pages_of
from hybserve.plan.result import EngineLimits
from hybserve.scheduler.queues import Waiting
from hybserve.scheduler.request import Sequence

#: Seconds that a refused client is told to wait, at most.
_LONGEST_RETRY = 60


class Door:
    """Refuses what can never run here, what comes while draining, and what the queue has no room for."""

    def __init__(self, limits: EngineLimits, max_queue: int, max_queue_tokens: int | None) -> None:
        self._limits = limits
        self._max_queue = max_queue
        self._max_queue_tokens = max_queue_tokens
        self._sequences = min(limits.max_running, limits.state_slots - 1)
        self.draining = False
        #: Seconds that the last admitted request had waited: what the next one can expect.
        self.last_wait = 0.0

    def refusal(self, message: Generate, waiting: Waiting) -> RequestError | None:
        """Why ``message`` cannot be taken, with the numbers; None lets it into the queue."""
        if self.draining:
            return unavailable("draining", "The server is shutting down and takes no new requests.")
        return self._never(message) or self._not_now(message, waiting)

    def _never(self, message: Generate) -> RequestError | None:
        limits, prompt, wanted = self._limits, len(message.prompt), message.sampling.max_tokens
        if prompt < 1 or wanted < 1 or message.n < 1:
            return invalid_value("A request needs at least one prompt token, one new token and one choice.")
        if prompt + wanted > limits.max_seq_len:
            return context_length_exceeded(limits.max_seq_len, prompt, wanted)
        if message.n > self._sequences:
            return exceeds_capacity(
                f"n = {message.n} choices run at once, and this server runs at most {self._sequences} sequences "
                f"(engine.max_running). Ask for fewer choices.",
                "n",
            )
        need, have = pages_of(prompt + wanted - 1, limits.page_size), limits.kv_pages - 1
        if need > have:
            return exceeds_capacity(
                f"The prompt of {prompt} tokens and max_tokens {wanted} can need {need} KV pages of "
                f"{limits.page_size} tokens; this server has {have}. Shorten the prompt or lower max_tokens.",
                "max_tokens",
            )
        return None

    def _not_now(self, message: Generate, waiting: Waiting) -> RequestError | None:
        retry = min(max(math.ceil(self.last_wait), 1), _LONGEST_RETRY)
        if waiting.requests >= self._max_queue:
            return queue_full(f"{waiting.requests} requests wait already, no more than that may.", retry)
        most = self._max_queue_tokens
        if most is not None and waiting.requests and waiting.tokens + len(message.prompt) > most:
            return queue_full(
                f"{waiting.tokens} prompt tokens wait already; with the {len(message.prompt)} of this request they "
                f"would exceed the {most} that may.",
                retry,
            )
        return None


def pages_at_admission(lead: Sequence, chunk: int, page_size: int) -> int:
    """Pages of the first chunk and one to grow, never more than the request can use.

    A resumed sequence takes all that it had: it would otherwise be parked again before it is where it was.
    """
    resumed = lead.fill > len(lead.request.prompt)
    first = pages_of(lead.fill if resumed else chunk, page_size)
    return min(first + 1, pages_of(lead.request.longest, page_size))
