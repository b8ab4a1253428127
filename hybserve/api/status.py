"""Whether this server can take requests: loading, ready, draining, stalled or lost."""

import time

from hybserve.core.errors import ErrorBody, RequestError, unavailable

#: Role whose Ready says only that it can forward.
TEXT_ROLE = "text"


class Status:
    """State of the roles behind this api, fed by the messages that text forwards."""

    def __init__(self, stall_timeout: float) -> None:
        self.stage = "starting"
        self.progress = 0.0
        self.engine_ready = False
        self.draining = False
        self.stopping = False  # the process is ending, losing neighbours is expected
        self.lost: ErrorBody | None = None
        self._stall_timeout = stall_timeout
        self._last_beat = 0.0

    def load(self, stage: str, done: float) -> None:
        if not self.engine_ready:
            self.stage, self.progress = stage, min(max(done, 0.0), 1.0)

    def ready(self, role: str, now: float) -> None:
        if role != TEXT_ROLE:
            self.engine_ready = True
            self.stage, self.progress = "ready", 1.0
            self._last_beat = now

    def beat(self, role: str, now: float) -> None:
        if role != TEXT_ROLE:
            self._last_beat = now

    def lose(self, message: str) -> ErrorBody:
        """From now on everything is refused with the error that is returned (the first loss wins)."""
        if self.lost is None:
            self.lost = unavailable("engine_unhealthy", message).body
        return self.lost

    @property
    def stalled(self) -> bool:
        return self.engine_ready and time.monotonic() - self._last_beat > self._stall_timeout

    def trouble(self) -> ErrorBody | None:
        """Why the server is not healthy, None while it is (loading and draining are healthy)."""
        if self.lost is not None:
            return self.lost
        if self.stalled:
            return unavailable("engine_unhealthy", "The engine has stopped responding.").body
        return None

    def refusal(self) -> ErrorBody | None:
        """Why a request would be refused now, None when the server is ready."""
        trouble = self.trouble()
        if trouble is not None:
            return trouble
        if self.draining:
            return unavailable("draining", "The server is shutting down and takes no new requests.").body
        if not self.engine_ready:
            return unavailable("model_loading", f"The model is loading: {self.stage}, {self.progress:.0%} done.").body
        return None

    def admit(self) -> None:
        """Raises RequestError (503) unless the server is ready."""
        refusal = self.refusal()
        if refusal is not None:
            raise RequestError(refusal)

    @property
    def name(self) -> str:
        """One word for bodies of the health routes."""
        if self.lost is not None:
            return "lost"
        if self.stalled:
            return "stalled"
        if self.draining:
            return "draining"
        return "ready" if self.engine_ready else "loading"
