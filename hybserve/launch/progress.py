"""Loading progress: a bar with GB and GB/s on a terminal, a log line per stage elsewhere."""

import logging
import sys
import time
from types import TracebackType
from typing import Any, Self

from hybserve.core.messages import Loading
from hybserve.observe.log import event

logger = logging.getLogger(__name__)

_WEIGHTS = "weights"  # the stage whose share is a share of bytes


class LoadProgress:
    """Show Loading messages until the block ends. ``total``: bytes of all weights."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._stage = ""
        self._since = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.fields[detail]}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("starting", total=1.0, detail="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, message: Loading) -> None:
        if message.stage != self._stage:
            self._stage, self._since = message.stage, time.monotonic()
        detail = self._detail(message)
        if self._bar is not None:
            self._bar.update(self._task, description=message.stage, completed=message.done, detail=detail)
        elif message.done >= 1:
            event(logger, "info", "loaded", stage=message.stage, detail=detail)

    def _detail(self, message: Loading) -> str:
        if not message.stage.startswith(_WEIGHTS):
            return f"{message.done:.0%}"
        unit, size = ("GB", 1e9) if self._total >= 1e9 else ("MB", 1e6)
        done, seconds = message.done * self._total, max(time.monotonic() - self._since, 1e-3)
        return f"{done / size:.2f} of {self._total / size:.2f} {unit}, {done / seconds / 1e9:.2f} GB/s"
