"""The text role's worker process: ``python -m hybserve.text.worker FD SETTINGS``.

One job at a time over the socket ``FD``. It ends when the socket closes or its parent dies, and may be killed at any
moment. What a template can do here is bounded by the parent's clock and by an address-space limit set after loading.
"""

import ctypes
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from hybserve.core.errors import EXIT_FATAL, HybserveError, RequestError, engine_error, invalid_value
from hybserve.core.messages import ChatPrompt
from hybserve.observe import log
from hybserve.text.anchors import render_with_landmarks
from hybserve.text.chat import ChatTemplates
from hybserve.text.detokenize import Detokenizer
from hybserve.text.jobs import (
    Decode,
    Decoded,
    Encode,
    Encoded,
    FromWorker,
    Job,
    Outcome,
    Refused,
    WorkerBroken,
    WorkerReady,
    WorkerSettings,
)
from hybserve.text.tokenize import Tokenizer, load_tokenizer, too_many_bytes
from hybserve.wire.channel import Channel, ChannelClosed
from hybserve.wire.codec import Codec

_log = logging.getLogger("hybserve.text.worker")

_PR_SET_PDEATHSIG = 1


class Workshop:
    """What the worker works with; usable without a process too. Jobs never raise: a failure is an outcome."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._tokenizer: Tokenizer = load_tokenizer(Path(settings.model_dir), settings.vocab_size, settings.eos_ids)
        self._context = settings.max_seq_len
        self._limit = self._tokenizer.byte_limit(settings.max_seq_len)
        self._chat = ChatTemplates(
            self._tokenizer.chat_templates, self._tokenizer.names, settings.max_seq_len, self._limit
        )
        self._detokenizer = Detokenizer(self._tokenizer)

    def do(self, job: Job) -> Outcome:
        try:
            match job:
                case Encode():
                    return self._encode(job)
                case Decode():
                    return Decoded(job.job, self._detokenizer.decode(job.ids, skip_special=False))
        except RequestError as error:
            return Refused(job.job, error.body)
        except MemoryError:
            return Refused(job.job, invalid_value("The prompt needs too much memory to prepare.").body)
        except Exception:
            _log.exception("a prompt could not be prepared")
            return Refused(job.job, engine_error("The prompt could not be prepared.").body)

    def _encode(self, job: Encode) -> Encoded:
        text, marks = self._text(job)
        param = "messages" if isinstance(job.prompt, ChatPrompt) else "prompt"
        ids, anchors = self._tokenizer.encode_with(text, job.add_special_tokens, marks, param)
        return Encoded(job.job, ids, anchors, text if job.return_text else "")

    def _text(self, job: Encode) -> tuple[str, list[int]]:
        """What to encode, and the character positions in it that are wanted as anchors. Raises RequestError."""
        if isinstance(job.prompt, ChatPrompt):
            if job.anchors:
                return render_with_landmarks(self._chat, job.prompt)
            return self._chat.render(job.prompt), []
        size = len(job.prompt.text.encode("utf-8", "replace"))
        if size > self._limit:
            raise too_many_bytes(size, self._limit, self._context)
        return job.prompt.text, []


def main(fd: int, settings: WorkerSettings) -> None:
    _die_with_parent()
    log.setup("text", settings.log_level, settings.log_format)
    incoming: Codec[Job] = Codec(Job)
    outgoing: Codec[FromWorker] = Codec(FromWorker)
    channel = Channel(socket.socket(fileno=fd), incoming, outgoing)
    try:
        workshop = Workshop(settings)
    except HybserveError as error:
        channel.send([WorkerBroken(str(error), error.exit_code)])
        channel.close()
        return
    _limit_memory(settings.memory)
    channel.send([WorkerReady()])
    while True:
        try:
            jobs = channel.receive()
        except ChannelClosed:
            return
        channel.send([workshop.do(job) for job in jobs])


def _die_with_parent() -> None:
    """Even a template that never ends must not outlive the role: ask the kernel to kill us with it."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(EXIT_FATAL)


def _limit_memory(beyond: int) -> None:
    """Let the process grow by ``beyond`` bytes of address space at most, and leave no core file."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + beyond,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=WorkerSettings))
