"""The child's side: start arguments, death with the parent, and the hand-over to the role's own ``run``."""

import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from hybserve.core.errors import EXIT_FATAL, EXIT_OK, HybserveError
from hybserve.core.messages import Fatal, FromLaunch, ToLaunch
from hybserve.core.types import ServingFacts
from hybserve.observe import log
from hybserve.plan.result import Plan
from hybserve.spec.model_spec import ModelSpec
from hybserve.wire.channel import Channel
from hybserve.wire.codec import Codec

_PR_SET_PDEATHSIG = 1


class RoleStart(msgspec.Struct, frozen=True):
    """All that a role is told, as one JSON document. ``sockets``: link name -> inherited descriptor."""

    role: str
    parent: int  # process id, to notice a parent that died before the child could arm itself
    told: float  # when the parent wrote this, by the monotonic clock
    deployment: str  # Deployment.to_json
    plan: Plan
    spec: ModelSpec
    facts: ServingFacts
    log_level: log.Level
    log_format: log.Format
    sockets: dict[str, int]

    def socket(self, name: str) -> socket.socket:
        return socket.socket(fileno=self.sockets[name])


def enter(start: RoleStart, run: Callable[[RoleStart], None]) -> int:
    """Arm the process, call ``run``, turn what escapes into Fatal. Returns the exit code."""
    die_with_parent(start.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    log.setup(start.role, start.log_level, start.log_format)
    _watch_parent(os.dup(start.sockets["control"]))
    last_words = os.dup(start.sockets["control"])
    try:
        run(start)
    except HybserveError as error:
        return _report_fatal(last_words, start.role, str(error), error.exit_code)
    except Exception as error:
        logging.getLogger(__name__).exception("%s ended by an error", start.role)
        return _report_fatal(last_words, start.role, f"{type(error).__name__}: {error}", EXIT_FATAL)
    return EXIT_OK


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies (Linux); ends at once if it is dead already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(EXIT_FATAL)


def _watch_parent(descriptor: int) -> None:
    """A thread that ends this process when the control link breaks; it works inside long native calls too."""

    def watch() -> None:
        poller = select.poll()
        poller.register(descriptor, 0)  # hang-up and errors only: what arrives is the role's to read
        while not poller.poll():
            pass
        os._exit(EXIT_FATAL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _report_fatal(descriptor: int, role: str, reason: str, exit_code: int) -> int:
    with socket.socket(fileno=descriptor) as sock:
        channel: Channel[FromLaunch, ToLaunch] = Channel(sock, Codec(FromLaunch), Codec(ToLaunch))
        channel.send([Fatal(role, reason, exit_code)])
        channel.close()
    return exit_code
