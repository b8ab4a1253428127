"""``hybserve serve``: refuse what cannot work before anything is loaded, start the roles, watch them, end in order."""

import http.client
import logging
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import psutil

from hybserve.config.deployment import SILENCE, Deployment
from hybserve.config.load import check_servable
from hybserve.core.errors import EXIT_OK, ConfigError, HybserveError
from hybserve.core.messages import Drain, Ready, Stop
from hybserve.launch.ahead import Ahead
from hybserve.launch.group import RoleFailed, RoleGroup
from hybserve.launch.prepare import Prepared, model_directory, prepare
from hybserve.launch.progress import LoadProgress
from hybserve.launch.report import Started, print_report
from hybserve.launch.role import RoleStart
from hybserve.launch.signals import StopSignals
from hybserve.observe import log
from hybserve.observe.log import event
from hybserve.observe.stages import Stages

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_PROBE = 1.0  # seconds to wait for the answer of our own readiness route
_DELIVERY = 3.0  # seconds in which api and text hand out the errors of a lost role
_ABORT = 5.0  # seconds in which a role may end by itself once it was told to stop
_DRAIN_SLACK = 5.0  # seconds beyond server.drain_timeout until a drain is cut off


def serve(deployment: Deployment, ahead: Ahead, silence: float | None = None) -> int:
    """Serve until SIGTERM or SIGINT (a drain, exit code 0) or until a role is lost. Returns the exit code."""
    log.setup("launch", deployment.log.level, deployment.log.format)
    clock, group = StageClock(), ahead.roles
    try:
        check_servable(deployment)
        directory = model_directory(deployment)
        clock.lap("model")
        prepared = prepare(deployment, directory)
        clock.lap("plan")
        listener = bind(deployment.server.host, deployment.server.port)
    except HybserveError as error:
        print(f"hybserve: {error}", file=sys.stderr)
        return error.exit_code
    group.silence = silence or SILENCE[prepared.backend]
    with StopSignals() as signals:
        try:
            return _run(prepared, listener, ahead, signals, clock)
        except RoleFailed as failure:
            event(logger, "error", "a role is lost, the server ends", lost=failure.role, reason=failure.reason)
            print(f"hybserve: {failure}", file=sys.stderr)
            _hand_out_errors(group)
            return failure.exit_code


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Raises ConfigError with the key to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"server.host: {host}: {error.strerror}") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"server.port: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; "
            "choose another with --set server.port=… (0 = any free one)"
        ) from error
    return sock


class StageClock(Stages):
    """Times of the stages of a start, in seconds; together they are the time since this process began."""

    def __init__(self) -> None:
        super().__init__()
        self.times.append(("interpreter", _age()))

    def lap_split(self, name: str, parts: list[tuple[str, float]]) -> None:
        """A lap of which ``parts`` were measured elsewhere; the rest of it is called ``name``."""
        self.lap(name)
        _, whole = self.times.pop()
        rest = max(0.0, whole - sum(seconds for _, seconds in parts))
        self.times += [(name, rest), *parts]


def _age() -> float:
    """Seconds since this process began. (psutil knows the time of boot in whole seconds only.)"""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return time.time() - psutil.Process().create_time()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _run(prepared: Prepared, listener: socket.socket, ahead: Ahead, signals: StopSignals, clock: StageClock) -> int:
    host, port = _reachable(prepared.deployment.server.host), listener.getsockname()[1]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    group = ahead.roles
    _start_roles(prepared, listener, ahead)
    weights = sum(stage.weight_bytes for stage in prepared.plan.stages)
    with LoadProgress(weights) as progress:
        while not group.ready and not signals.count():
            for message in group.poll(signals.wake):
                progress.show(message)
        while not signals.count() and not _answers(host, port):
            group.poll(signals.wake)
    if signals.count():  # nobody was served yet: leaving the group ends all of them
        return EXIT_OK
    ready = [role.ready for role in group.roles.values() if role.ready is not None]
    _announce(prepared, url, ready, clock)
    while not signals.count():
        group.poll(signals.wake)
    _drain(group, signals, prepared.deployment.server.drain_timeout)
    _stop(group)
    return EXIT_OK


def _start_roles(prepared: Prepared, listener: socket.socket, ahead: Ahead) -> None:
    """Tell the engine what it shall do, and start those who stand before it."""
    group = ahead.roles
    api_text, text_api = socket.socketpair()
    group.start("api", {"listener": listener, "text": api_text})
    group.start("text", {"api": text_api, "engine": ahead.to_engine})
    for name in ("engine", "api", "text"):
        group.roles[name].tell(partial(_arguments, prepared, name))


def _arguments(prepared: Prepared, role: str, descriptors: dict[str, int]) -> bytes:
    start = RoleStart(
        role=role,
        parent=os.getpid(),
        told=time.monotonic(),
        deployment=prepared.deployment.to_json(),
        plan=prepared.plan,
        spec=prepared.spec,
        facts=prepared.facts,
        log_level=prepared.deployment.log.level,
        log_format=_format(prepared.deployment),
        sockets=descriptors,
    )
    return msgspec.json.encode(start)


def _announce(prepared: Prepared, url: str, ready: list[Ready], clock: StageClock) -> None:
    measured = [stage for role in ready if role.role == "engine" for stage in role.stages]
    clock.lap_split("processes", measured)
    started = Started(
        spec=prepared.spec,
        plan=prepared.plan,
        facts=prepared.facts,
        backend=prepared.backend,
        dtype=prepared.dtype,
        url=url,
        key_variable=prepared.deployment.server.api_key_env,
        ready=ready,
        stages=clock.times,
    )
    print_report(started, sys.stdout)
    event(logger, "info", "ready", url=url, seconds=sum(seconds for _, seconds in clock.times))


def _drain(group: RoleGroup, signals: StopSignals, timeout: float) -> None:
    """Let api finish what runs; a second signal cuts it short. Raises RoleFailed if another role is lost meanwhile."""
    event(logger, "info", "draining", seconds=timeout)
    group.expect_end(["api"])
    group.send(["api"], Drain())
    deadline = time.monotonic() + timeout + _DRAIN_SLACK
    aborted = False
    while "api" in group.roles and time.monotonic() < deadline:
        signals.clear_wake()
        group.poll(signals.wake)
        if signals.count() > 1 and not aborted:
            aborted = True
            event(logger, "info", "a second signal: ending now")
            group.send(["api"], Stop())
            deadline = time.monotonic() + _ABORT


def _stop(group: RoleGroup) -> None:
    """Every role ends; what has not gone after a moment is killed when the group is left."""
    names = list(group.roles)
    group.expect_end(names)
    group.send(names, Stop())
    group.listen(_ABORT)


def _hand_out_errors(group: RoleGroup) -> None:
    """A role is lost: the others tell their clients, then everything ends."""
    if "api" in group.roles:
        group.listen(_DELIVERY, until_idle="api")
        _stop(group)


def _reachable(host: str) -> str:
    """A host name by which this machine reaches what listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def _answers(host: str, port: int) -> bool:
    """Whether clients are served by now: every role has said Ready, but the word must also have reached the api."""
    connection = http.client.HTTPConnection(host, port, timeout=_PROBE)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _format(deployment: Deployment) -> log.Format:
    """``auto`` is decided here once: the roles write to the parent's standard error."""
    if deployment.log.format != "auto":
        return deployment.log.format
    return "pretty" if sys.stderr.isatty() else "json"
