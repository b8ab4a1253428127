"""What each role's process runs: its links turned into channels, then the role's own ``run``."""

import importlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hybserve.core.messages import FromLaunch, FromScheduler, Loading, Ready, ToApi, ToLaunch, ToScheduler, ToText
from hybserve.launch.cores import claim_cores
from hybserve.launch.role import RoleStart
from hybserve.observe.stages import Stages
from hybserve.wire.channel import AsyncChannel, Channel
from hybserve.wire.codec import Codec


def _control(start: RoleStart) -> AsyncChannel[FromLaunch, ToLaunch]:
    return AsyncChannel(start.socket("control"), Codec(FromLaunch), Codec(ToLaunch))


def _api(start: RoleStart) -> None:
    from hybserve.api.main import run
    from hybserve.config.deployment import Deployment

    text: AsyncChannel[ToApi, ToText] = AsyncChannel(start.socket("text"), Codec(ToApi), Codec(ToText))
    deployment = Deployment.from_json(start.deployment)
    run(deployment, start.facts, [start.socket("listener")], text, _control(start))


def _text(start: RoleStart) -> None:
    from hybserve.config.deployment import Deployment
    from hybserve.text.main import run

    api: AsyncChannel[ToText, ToApi] = AsyncChannel(start.socket("api"), Codec(ToText), Codec(ToApi))
    engine: AsyncChannel[FromScheduler, ToScheduler] = AsyncChannel(
        start.socket("engine"), Codec(FromScheduler), Codec(ToScheduler)
    )
    run(Deployment.from_json(start.deployment), start.facts, [api], engine, _control(start))


def prepare_engine() -> None:
    """All that the engine needs no arguments for. An import that fails is tried again where it can be told."""
    claim_cores()
    with suppress(ImportError):
        from hybserve_kernels.compiling import prepare

        from hybserve.plan.facts import probe_gpu

        def prepare_compilers() -> None:
            if probe_gpu():
                prepare()

        threading.Thread(target=prepare_compilers, daemon=True).start()
        for name in ("hybserve.runner.main", "hybserve.scheduler.main"):
            importlib.import_module(name)


def _engine(start: RoleStart) -> None:
    """Scheduler and runner in one process and one thread."""
    stages = Stages(start.told)
    from hybserve.config.deployment import Deployment
    from hybserve.runner.main import build_runner
    from hybserve.runner.memory import drift
    from hybserve.scheduler.main import run

    text: Channel[ToScheduler, FromScheduler] = Channel(start.socket("text"), Codec(ToScheduler), Codec(FromScheduler))
    control: Channel[FromLaunch, ToLaunch] = Channel(start.socket("control"), Codec(FromLaunch), Codec(ToLaunch))
    deployment, limits = Deployment.from_json(start.deployment), start.plan.engine
    assert limits is not None
    loading = _LoadReporter(text, control)
    stages.lap("imports")
    runner = build_runner(deployment, start.spec, limits, Path(start.facts.model_dir), loading.weights, stages)
    ready = Ready("engine", drift(start.plan.stages[0], runner.measured()), stages.times)
    run(
        limits,
        deployment.server.max_queue,
        deployment.server.max_queue_tokens,
        runner,
        text,
        control,
        ready,
        debug=deployment.log.level == "debug",
    )
    text.close()
    control.close()


class _LoadReporter:
    """Tells both neighbours how far loading is, a few times a second."""

    _EVERY = 0.1

    def __init__(self, text: Channel[ToScheduler, FromScheduler], control: Channel[FromLaunch, ToLaunch]) -> None:
        self._text = text
        self._control = control
        self._next = 0.0

    def weights(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next and done < total:
            return
        self._next = now + self._EVERY
        message = Loading("weights", done / total if total else 1.0)
        self._text.send([message])
        self._control.send([message])


ROLES: dict[str, Callable[[RoleStart], None]] = {"api": _api, "text": _text, "engine": _engine}
