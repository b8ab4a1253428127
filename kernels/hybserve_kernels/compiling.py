"""Compile many kernels at once, before any of them is launched."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Inside, a launch compiles its kernel, unless the disk cache has it, and launches nothing; leaving waits for all
    compilers, of which there are as many as processors. Most of a compilation runs outside of Python's lock.

    What kernels would have written stays as it was, so nothing computed inside means anything, and no torch operation
    there may use it as an index."""
    run: Any = JITFunction.run

    def only_compile(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return run(self, *args, warmup=True, **kwargs)

    JITFunction.run = only_compile
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, AsyncCompileMode(pool):
            yield
    finally:
        JITFunction.run = run
