"""How long the stages of a start take."""

import time


class Stages:
    """``times``: (name, seconds) of the stages so far, without a gap between them."""

    def __init__(self) -> None:
        self.times: list[tuple[str, float]] = []
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """The stage that began at the last lap ends."""
        now = time.monotonic()
        self.times.append((name, now - self._last))
        self._last = now
