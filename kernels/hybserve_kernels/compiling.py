"""Compile many kernels at once, before any of them is launched.

Triton's front end holds Python's lock, so threads would take turns: each compilation is a process of its own, forked
from this one, that leaves its result in Triton's cache on disk; here it is then found. A process that dies or takes too
long costs nothing but its time: what is not in the cache is compiled here.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

#: Seconds after which a compilation that goes on in a child is given up there.
_PATIENCE = 120
_PR_SET_PDEATHSIG = 1


class _Children(Executor):
    """Collects compilations; ``run`` does them all, as many at a time as there are processors."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        most, running = len(os.sched_getaffinity(0)), 0
        for _, job in self._jobs:
            if running == most:
                os.wait()
                running -= 1
            running += _forked(job)
        for _ in range(running):
            os.wait()
        for future, job in self._jobs:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)


def _forked(job: Callable[[], Any]) -> bool:
    """Run a job in a child that shares nothing with us afterwards but the files it writes."""
    if os.fork():
        return True
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the process that waits for it
    signal.alarm(_PATIENCE)
    try:
        job()
    finally:
        os._exit(0)


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Inside, a launch notes its kernel and launches nothing; on leaving, all are compiled that the disk cache has not.
    To be used while this process has no other child and no other thread does anything.

    What kernels would have written stays as it was, so nothing computed inside means anything, and no torch operation
    there may use it as an index."""
    run: Any = JITFunction.run

    def only_compile(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return run(self, *args, warmup=True, **kwargs)

    children = _Children()
    with AsyncCompileMode(children):
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = run
        children.run()
