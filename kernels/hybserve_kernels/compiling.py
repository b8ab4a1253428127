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
from types import SimpleNamespace
from typing import Any

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


class _Compilers:
    """Children that take descriptions of kernels from one queue until it ends."""

    def __init__(self) -> None:
        _settle_keys()
        self._sent: set[bytes] = set()
        self._queue, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        count = min(len(os.sched_getaffinity(0)), _MOST_CHILDREN)
        self._children = [self._fork(theirs, index) for index in range(count)]
        theirs.close()

    def _fork(self, queue: socket.socket, index: int) -> int:
        child = os.fork()
        if child:
            return child
        try:
            self._queue.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the process that waits for it
            _work(queue, first=index == 0)
        finally:
            os._exit(0)

    def send(self, job: bytes) -> None:
        """Have a kernel compiled; each is compiled once."""
        if job not in self._sent:
            self._sent.add(job)
            with suppress(BrokenPipeError):  # all of them died
                self._queue.send(job)

    def wait(self) -> None:
        """Until all that was sent is compiled."""
        self._queue.close()
        for child in self._children:
            os.waitpid(child, 0)


def _settle_keys() -> None:
    """Triton names a kernel in its cache by what it reads at the first asking, and whether the constants of functions
    it calls are among that depends on who was asked before. Once they were all asked, our children find the same."""
    ours = __name__.partition(".")[0]
    for name in sorted(name for name in sys.modules if name.partition(".")[0] == ours):
        for value in vars(sys.modules[name]).values():
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018


def _work(queue: socket.socket, first: bool) -> None:
    """A child's life. What all need before the first kernel comes while there is none yet."""
    knobs.runtime.jit_cache_hook = None
    if first:
        _tried("the driver's utilities", CudaUtils)
    triton_key()
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


def _compile(module: str, name: str, device: int, target: list[Any], data: str) -> None:
    """Compile a kernel and its launcher into the cache on disk, for a GPU that this process does not touch."""
    function = getattr(importlib.import_module(module), name)
    gpu = GPUTarget(*target)
    driver.set_active(SimpleNamespace(get_current_device=lambda: device, get_current_target=lambda: gpu))
    kernel = function.preload(data)
    with suppress(AttributeError):  # of a Triton whose launcher is no code of its own, but asks the driver
        CudaLauncher(kernel.src, kernel.metadata)


_AT_HAND: ContextVar[_Compilers | None] = ContextVar("_AT_HAND", default=None)


@contextmanager
def compilers_at_hand() -> Iterator[None]:
    """Inside, ``compiled_ahead`` has compilers that were forked on entering and does not wait for them; leaving does.
    To be entered before this process initialises CUDA, while no other thread computes anything."""
    compilers = _Compilers()
    token = _AT_HAND.set(compilers)
    threading.Thread(target=triton_key, daemon=True).start()  # half a second of hashing that the first launch wants
    try:
        yield
    finally:
        _AT_HAND.reset(token)
        compilers.wait()


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Inside, a launch sends its kernel to the compilers and launches nothing. Without ``compilers_at_hand`` they are
    forked on entering, and leaving waits for them.

    What kernels would have written stays as it was, so nothing computed inside means anything, and no torch operation
    there may use it as an index."""
    run: Any = JITFunction.run

    def only_compile(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
        with suppress(TypeError):  # of arguments that JSON cannot say: compiled at its first launch
            run(self, *args, warmup=True, **kwargs)

    with ExitStack() as stack:
        compilers = _AT_HAND.get()
        if compilers is None:
            stack.enter_context(compilers_at_hand())
            compilers = _AT_HAND.get()
        assert compilers is not None
        send = compilers.send

        def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            target = driver.active.get_current_target()
            job = {
                "module": fn.module,
                "name": fn.name.rpartition(".")[2],
                "device": compile["device"],
                "target": [target.backend, target.arch, target.warp_size],
                "data": compile["specialization_data"],
            }
            send(json.dumps(job).encode())
            return True

        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = run
            knobs.runtime.jit_cache_hook = before
