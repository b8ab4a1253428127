"""The worker process as the text role sees it: jobs in, outcomes out, a deadline for each.

Chat templates and long encodes run there, one at a time, so that the loop that serves running streams never waits for
them. A job that overruns its deadline costs the worker its life and the request a refusal; a worker that dies with a
job is replaced and the job tried once more, in case it was not to blame.
"""

import asyncio
import logging
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from hybserve.core.errors import EXIT_MODEL, ErrorBody, HybserveError, ModelError, engine_error, invalid_value
from hybserve.core.messages import ChatPrompt, Message, TextPrompt
from hybserve.observe import log
from hybserve.wire.channel import AsyncChannel, ChannelClosed
from hybserve.wire.codec import Codec

_log = logging.getLogger("hybserve.text")

_START_TIMEOUT = 120.0  # seconds until a started worker has read the tokenizer
_START_ATTEMPTS = 3


class Encode(Message, frozen=True):
    """Render if it is a conversation, then encode."""

    job: int
    prompt: ChatPrompt | TextPrompt
    add_special_tokens: bool = True
    anchors: bool = False  # also tell where checkpoints are worth it
    return_text: bool = False


class Decode(Message, frozen=True):
    job: int
    ids: list[int]


class Encoded(Message, frozen=True):
    """``anchors`` in tokens; ``text`` is what was encoded. Both only if asked for."""

    job: int
    ids: list[int]
    anchors: list[int] = msgspec.field(default_factory=list)
    text: str = ""


class Decoded(Message, frozen=True):
    job: int
    text: str


class Refused(Message, frozen=True):
    job: int
    error: ErrorBody


class WorkerReady(Message, frozen=True):
    pass


class WorkerBroken(Message, frozen=True):
    """The worker cannot start; ``exit_code`` as in core.errors."""

    reason: str
    exit_code: int


Job: TypeAlias = Encode | Decode
Outcome: TypeAlias = Encoded | Decoded | Refused
FromWorker: TypeAlias = Outcome | WorkerReady | WorkerBroken


class WorkerSettings(msgspec.Struct, frozen=True):
    """Start arguments of the worker process; they travel as JSON. ``memory`` in bytes beyond what loading took."""

    model_dir: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_seq_len: int
    log_level: log.Level = "info"
    log_format: log.Format = "auto"
    memory: int = 4 << 30
    deadline: float = 10.0  # seconds a job may take …
    deadline_per_mib: float = 15.0  # … and more for every MiB of input


class Worker:
    """Feeds the worker process and restarts it. ``deliver`` gets every outcome, on the loop's thread."""

    def __init__(self, settings: WorkerSettings, deliver: Callable[[Outcome], None]) -> None:
        self._settings = settings
        self._deliver = deliver
        self._queue: deque[tuple[Job, int]] = deque()  # with the number of attempts so far
        self._wake = asyncio.Event()
        self._failed_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.ready = asyncio.Event()
        self.restarts = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def submit(self, job: Job) -> None:
        self._queue.append((job, 0))
        self._wake.set()

    def forget(self, job: int) -> None:
        """Take a waiting job back; one that runs already ends by itself and its outcome means nothing."""
        self._queue = deque(entry for entry in self._queue if entry[0].job != job)

    async def run(self) -> None:
        """Keep a worker alive until cancelled. Raises ModelError or HybserveError when none can be started."""
        while True:
            await self._one_life()
            self.restarts += 1
            log.event(_log, "warning", "text worker replaced", restarts=self.restarts)

    async def _one_life(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._process = _spawn(self._settings, theirs)
        incoming: Codec[FromWorker] = Codec(FromWorker)
        outgoing: Codec[Job] = Codec(Job)
        channel = AsyncChannel(ours, incoming, outgoing)
        try:
            if await self._started(channel):
                while await self._one_job(channel):
                    pass
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)  # freeing gigabytes takes the kernel a while
            channel.close()

    async def _started(self, channel: AsyncChannel[FromWorker, Job]) -> bool:
        try:
            (message,) = await asyncio.wait_for(channel.receive(), _START_TIMEOUT)
        except (ChannelClosed, TimeoutError) as error:
            self._failed_starts += 1
            if self._failed_starts >= _START_ATTEMPTS:
                raise HybserveError("the text worker process does not start") from error
            return False
        if isinstance(message, WorkerBroken):
            raise (ModelError if message.exit_code == EXIT_MODEL else HybserveError)(message.reason)
        self._failed_starts = 0
        self.ready.set()
        return True

    async def _one_job(self, channel: AsyncChannel[FromWorker, Job]) -> bool:
        """Run the next job; false when the worker is lost."""
        while not self._queue:
            self._wake.clear()
            await self._wake.wait()
        job, attempts = self._queue.popleft()
        channel.send([job])
        try:
            outcomes = await asyncio.wait_for(channel.receive(), self._deadline(job))
        except TimeoutError:
            message = "The prompt took too long to prepare and was given up."
            self._deliver(Refused(job.job, invalid_value(message, _param(job)).body))
            return False
        except ChannelClosed:
            if attempts:
                self._deliver(Refused(job.job, engine_error("The prompt could not be prepared.").body))
            else:
                self._queue.appendleft((job, attempts + 1))
            return False
        for outcome in outcomes:
            if isinstance(outcome, (Encoded, Decoded, Refused)):
                self._deliver(outcome)
        return True

    def _deadline(self, job: Job) -> float:
        return self._settings.deadline + self._settings.deadline_per_mib * _size(job) / 2**20


def _size(job: Job) -> int:
    if isinstance(job, Decode):
        return 4 * len(job.ids)
    prompt = job.prompt
    return len(prompt.messages_json) if isinstance(prompt, ChatPrompt) else len(prompt.text)


def _param(job: Job) -> str:
    if isinstance(job, Decode):
        return "tokens"
    if isinstance(job.prompt, TextPrompt):
        return "prompt"
    return "messages" if job.prompt.template is None else "chat_template"


def _spawn(settings: WorkerSettings, sock: socket.socket) -> subprocess.Popen[bytes]:
    arguments = msgspec.json.encode(settings).decode()
    command = [sys.executable, "-m", "hybserve.text.worker", str(sock.fileno()), arguments]
    return subprocess.Popen(command, pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL)
