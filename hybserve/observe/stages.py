"""How long the stages of a start take."""

import time


class Stages:
    """``times``: (name, seconds) of the stages so far, without a gap between them. The first began at ``began`` by the
    monotonic clock, now if not given."""

    def __init__(self, began: float | None = None) -> None:
        self.times: list[tuple[str, float]] = []
        self._last = time.monotonic() if began is None else began

    def lap(self, name: str) -> None:
        """The stage that began at the last lap ends."""
        now = time.monotonic()
        self.times.append((name, now - self._last))
        self._last = now
