"""Compile many kernels at once, before any of them is launched.

Triton's front end holds Python's lock, so threads would take turns: processes compile, forked from this one, each
kernel in whichever is free. They leave what they made in Triton's cache on disk, where this process then finds it: the
kernel, and the glue through which the host launches it, which some versions of Triton have the C compiler make. A child
that dies or takes too long costs nothing but its time: what is not in the cache is compiled here.
"""

import ctypes
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

#: Seconds after which a compilation that goes on in a child is given up there.
_PATIENCE = 120
#: More children than this have nothing to do: an engine has some dozens of kernels.
_MOST_CHILDREN = 32
_MOST_BYTES = 1 << 17  # of the description of a kernel
_PR_SET_PDEATHSIG = 1


class _Job(NamedTuple):
    length: int  # characters of the functions to compile: about as many as it takes long
    launcher: str  # kernels of one are launched by the same glue
    kernel: dict[str, Any]  # arguments of `_compile`


class _Compilers:
    """Children that take descriptions of kernels from one queue until it ends."""

    def __init__(self) -> None:
        prepare()
        _settle_keys()
        self._sent: set[str] = set()
        self._queue, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        count = min(len(os.sched_getaffinity(0)), _MOST_CHILDREN)
        self._children = [self._fork(theirs) for _ in range(count)]
        theirs.close()

    def _fork(self, queue: socket.socket) -> int:
        child = os.fork()
        if child:
            return child
        try:
            self._queue.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the process that waits for it
            _work(queue)
        finally:
            os._exit(0)

    def send(self, jobs: list[_Job]) -> None:
        """Have kernels compiled, the longest first; of equal ones, and of equal launchers, one."""
        for job in sorted(jobs, key=lambda job: -job.length):
            kernel = json.dumps(job.kernel)
            if kernel not in self._sent:
                message = {**job.kernel, "launched": job.launcher not in self._sent}
                with suppress(BrokenPipeError):  # all of them died
                    self._queue.send(json.dumps(message).encode())
                self._sent |= {kernel, job.launcher}

    def wait(self) -> None:
        """Until all that was sent is compiled."""
        self._queue.close()
        for child in self._children:
            os.waitpid(child, 0)


@cache
def _prepare() -> None:
    _tried("the driver's utilities", CudaUtils)
    triton_key()


_PREPARING = threading.Lock()


def prepare() -> None:
    """What needs seconds before the first kernel can be compiled or launched: the C compiler makes Triton's glue to the
    driver, and Triton hashes itself. Done once, and by a thread while this one imports torch; a call waits for it."""
    with _PREPARING:
        _prepare()


def _settle_keys() -> None:
    """Triton names a kernel in its cache by what it reads at the first asking, and whether the constants of functions
    it calls are among that depends on who was asked before. Once they were all asked, our children find the same."""
    ours = __name__.partition(".")[0]
    for name in sorted(name for name in sys.modules if name.partition(".")[0] == ours):
        for value in vars(sys.modules[name]).values():
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018


def _work(queue: socket.socket) -> None:
    """A child's life."""
    knobs.runtime.jit_cache_hook = None
    while job := queue.recv(_MOST_BYTES):
        signal.alarm(_PATIENCE)
        description = json.loads(job)
        _tried(description["name"], lambda: _compile(**description))  # noqa: B023
        signal.alarm(0)


def _tried(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # which this process meets again when it launches the kernel
        log.warning("%s is not compiled ahead: %s", name, error)


def _compile(module: str, name: str, device: int, target: list[Any], data: str, launched: bool) -> None:
    """Compile a kernel, and its launcher if asked, into the cache on disk, for a GPU that this process leaves alone."""
    function = getattr(importlib.import_module(module), name)
    gpu = GPUTarget(*target)
    driver.set_active(SimpleNamespace(get_current_device=lambda: device, get_current_target=lambda: gpu))
    kernel = function.preload(data)
    if launched:
        with suppress(AttributeError):  # of a Triton whose launcher is no code of its own, but asks the driver
            CudaLauncher(kernel.src, kernel.metadata)


def _length(function: JITFunction[Any], counted: set[str]) -> int:
    """Characters of a function and of those that it calls."""
    counted.add(function.__name__)
    named = (function.__globals__.get(name) for name in function.fn.__code__.co_names)
    called = [each for each in named if isinstance(each, JITFunction) and each.__name__ not in counted]
    return len(function.src) + sum(_length(each, counted) for each in called)


_AT_HAND: ContextVar[_Compilers | None] = ContextVar("_AT_HAND", default=None)


@contextmanager
def compilers_at_hand() -> Iterator[None]:
    """Inside, ``compiled_ahead`` has compilers that were forked on entering and does not wait for them; leaving does.
    To be entered before this process initialises CUDA, while no other thread computes anything."""
    compilers = _Compilers()
    token = _AT_HAND.set(compilers)
    try:
        yield
    finally:
        _AT_HAND.reset(token)
        compilers.wait()


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Inside, a launch notes its kernel and launches nothing; on leaving, all go to the compilers. Without
    ``compilers_at_hand`` these are forked on entering, and leaving waits for them.

    What kernels would have written stays as it was, so nothing computed inside means anything, and no torch operation
    there may use it as an index."""
    run: Any = JITFunction.run
    jobs: list[_Job] = []

    def only_note(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
        with suppress(TypeError):  # of arguments that JSON cannot say: compiled at its first launch
            run(self, *args, warmup=True, **kwargs)

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        target = driver.active.get_current_target()
        kernel = {
            "module": fn.module,
            "name": fn.name.rpartition(".")[2],
            "device": compile["device"],
            "target": [target.backend, target.arch, target.warp_size],
            "data": compile["specialization_data"],
        }
        launcher = f"launcher of {list(compile['signature'].values())}"
        jobs.append(_Job(_length(fn.jit_function, set()), launcher, kernel))
        return True

    with ExitStack() as stack:
        compilers = _AT_HAND.get()
        if compilers is None:
            stack.enter_context(compilers_at_hand())
            compilers = _AT_HAND.get()
        assert compilers is not None
        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
        JITFunction.run = only_note
        try:
            yield
        finally:
            JITFunction.run = run
            knobs.runtime.jit_cache_hook = before
        compilers.send(jobs)
