"""SIGTERM and SIGINT of the parent, counted: the first asks for a drain, the second for an end now."""

import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Self

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While entered, the signals only count; ``wake`` becomes readable at each. Main thread only."""

    def __init__(self) -> None:
        self._count = 0
        self.wake, self._write = socket.socketpair()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.wake.setblocking(False)
        self._write.setblocking(False)
        self._before = {number: signal.signal(number, self._note) for number in _NUMBERS}
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.wake.close()
        self._write.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1

    def count(self) -> int:
        """Signals since the block was entered."""
        return self._count

    def clear_wake(self) -> None:
        """Make ``wake`` unreadable again; the count stays."""
        try:
            while self.wake.recv(64):
                pass
        except BlockingIOError:
            return
