"""The parent's hold on its roles: start them, hear them, notice within a second that one is gone or silent, end all.

Every role is the leader of a process group of its own, so that a role and what it started itself end together, and
so that a terminal's Ctrl-C reaches the parent alone.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import psutil

from hybserve.core.errors import EXIT_FATAL
from hybserve.core.messages import Fatal, FromLaunch, Heartbeat, Loading, Ready, ToLaunch
from hybserve.observe.log import event
from hybserve.wire.channel import Channel, ChannelClosed
from hybserve.wire.codec import Codec

logger = logging.getLogger(__name__)

_SOME_WORK = 0.02  # seconds of processor time that count as work
_TICK = 0.2  # seconds between looks at exit codes and clocks
_DUMP = 0.5  # seconds a silent role gets to write its stacks
#: Seconds of silence after which a role is lost at once if it has not used the processor either: it is stopped or
#: waits for something that never comes, and no long step explains it.
_STUCK = 30.0
_START_SILENCE = 900.0  # seconds without a word while a role starts: a cold disk may be slow
#: Role whose heartbeats must also show progress while it is busy: its loop turns even when no step completes.
_STEPPING = "engine"


class RoleFailed(Exception):
    """A role is gone or does not answer; ``exit_code`` is what the whole server ends with."""

    def __init__(self, role: str, reason: str, exit_code: int = EXIT_FATAL) -> None:
        super().__init__(f"{role}: {reason}")
        self.role = role
        self.reason = reason
        self.exit_code = exit_code


class Role:
    """One started role, as the parent sees it."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        control: Channel[ToLaunch, FromLaunch],
        descriptors: dict[str, int],
    ) -> None:
        self.name = name
        self.process = process
        self.control = control
        self._descriptors = descriptors
        self.ready: Ready | None = None
        self.busy = False
        self.heard = self.progressed = time.monotonic()
        self.leaving = False  # its end is expected
        self._working = self.heard  # when its process was last seen to work
        self._worked = 0.0  # its processor time then, in seconds
        self._progress = -1

    def tell(self, arguments: Callable[[dict[str, int]], bytes]) -> None:
        """Write its start arguments to its standard input. ``arguments`` gets the descriptors that it inherited by
        name, ``control`` among them."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:  # an early death is noticed by `poll`
            pipe.write(arguments(self._descriptors))

    def hear(self, message: ToLaunch) -> None:
        """Note one message. Raises RoleFailed on Fatal."""
        self.heard = time.monotonic()
        if isinstance(message, Fatal):
            raise RoleFailed(self.name, message.reason, message.exit_code)
        if isinstance(message, Ready):
            self.ready = message
            self.progressed = self.heard
        elif isinstance(message, Heartbeat):
            if message.progress != self._progress or not message.busy:
                self.progressed = self.heard
            self._progress, self.busy = message.progress, message.busy

    def silent_for(self, now: float) -> float:
        """Seconds since the last sign of life (for the engine: of work, if it has any)."""
        return now - (self.progressed if self.name == _STEPPING and self.ready else self.heard)

    def idle_for(self, now: float) -> float:
        """Seconds since its process was last seen to use the processor; asked about once a tick while it is silent."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return 0.0  # it has just ended, which `poll` notices by itself
        if times.user + times.system > self._worked + _SOME_WORK:
            self._worked, self._working = times.user + times.system, now
        return now - self._working

    def end_text(self) -> str:
        """How the process ended, in words; waits a moment for the exit code."""
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return "closed its control link"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """SIGKILL to the role and everything in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()


class RoleGroup:
    """All roles of one server. As a context manager it leaves no process behind, whatever happened."""

    def __init__(self, silence: float = _STUCK) -> None:
        """``silence``: seconds without a sign of life after which a role that was ready counts as lost."""
        self.roles: dict[str, Role] = {}
        self.silence = silence

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, name: str, links: Mapping[str, socket.socket], command: Sequence[str] | None = None) -> Role:
        """Start ``python -m hybserve.launch NAME`` (or ``command``), which waits for what `Role.tell` writes.

        The role inherits ``links``, which are closed here, and its end of a control link made here.
        """
        control, peer = socket.socketpair()
        inherited = {**links, "control": peer}
        process = subprocess.Popen(
            command or [sys.executable, "-m", "hybserve.launch", str(os.getpid()), name],
            stdin=subprocess.PIPE,
            pass_fds=[item.fileno() for item in inherited.values()],
            process_group=0,
            env=child_environment(),
        )
        descriptors = {link: item.fileno() for link, item in inherited.items()}
        for item in inherited.values():
            item.close()
        role = self.roles[name] = Role(name, process, Channel(control, Codec(ToLaunch), Codec(FromLaunch)), descriptors)
        return role

    @property
    def ready(self) -> bool:
        return all(role.ready is not None for role in self.roles.values())

    def send(self, names: Iterable[str], message: FromLaunch) -> None:
        for name in names:
            if name in self.roles:
                self.roles[name].control.send([message])

    def expect_end(self, names: Iterable[str]) -> None:
        """From now on these roles may end; ``poll`` then drops them."""
        for name in names:
            if name in self.roles:
                self.roles[name].leaving = True

    def poll(self, wake: socket.socket | None = None) -> list[Loading]:
        """Wait a moment for messages (or for ``wake`` to be readable), note them, and look after every role.

        Returns the loading progress heard. Raises RoleFailed for the first role that is lost.
        """
        poller = select.poll()
        for role in self.roles.values():
            poller.register(role.control, select.POLLIN)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        poller.poll(_TICK * 1000)
        progress: list[Loading] = []
        for role in list(self.roles.values()):
            self._hear(role, progress)
        now = time.monotonic()
        for role in self.roles.values():
            self._check_silence(role, now)
        return progress

    def _hear(self, role: Role, progress: list[Loading]) -> None:
        try:
            for message in role.control.receive(0):
                role.hear(message)
                if isinstance(message, Loading):
                    progress.append(message)
            ended = role.process.poll() is not None
        except ChannelClosed:
            ended = True
        except RoleFailed:
            del self.roles[role.name]
            _bury(role)
            raise
        if ended:
            reason = role.end_text()
            del self.roles[role.name]
            _bury(role)
            if not role.leaving:
                raise RoleFailed(role.name, reason)

    def _check_silence(self, role: Role, now: float) -> None:
        limit = self.silence if role.ready else _START_SILENCE
        silent = role.silent_for(now)
        if silent > _STUCK / 2 and role.idle_for(now) > _STUCK / 2:
            limit = min(limit, _STUCK)
        if role.leaving or silent < limit:
            return
        event(logger, "error", "no sign of life; stacks follow", lost=role.name, seconds=role.silent_for(now))
        for number in (signal.SIGUSR1, signal.SIGCONT):  # a stopped process must go on to write its stacks
            with contextlib.suppress(ProcessLookupError):
                os.kill(role.process.pid, number)
        time.sleep(_DUMP)
        del self.roles[role.name]
        _bury(role)
        raise RoleFailed(role.name, f"gave no sign of life for {limit:.0f} s")

    def listen(self, seconds: float, until_idle: str | None = None) -> None:
        """Go on for up to ``seconds``, whatever else fails; stop early when all ended or ``until_idle`` is idle.

        Idle counts only from a heartbeat sent after this call began and a moment had passed.
        """
        start = time.monotonic()
        while self.roles and time.monotonic() - start < seconds:
            with contextlib.suppress(RoleFailed):
                self.poll()
            role = self.roles.get(until_idle) if until_idle else None
            if until_idle and (role is None or (not role.busy and role.heard - start > 0.5)):
                return

    def kill(self) -> None:
        """End every role now and reap it."""
        for role in self.roles.values():
            role.kill()
        for role in self.roles.values():
            _bury(role)
        self.roles.clear()


def child_environment() -> dict[str, str]:
    """Ours, so that a child finds the same packages wherever it is started."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _bury(role: Role) -> None:
    """Kill what is left of the role and its group, reap it, close the link."""
    role.kill()
    if role.process.stdin is not None:
        role.process.stdin.close()
    role.process.wait()
    role.control.close()
