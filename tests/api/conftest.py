"""A scripted text role on a real link, and live servers over it."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybserve.api.main import ApiRole
from hybserve.api.settings import ApiSettings
from hybserve.core.errors import ErrorBody
from hybserve.core.messages import (
    Accepted,
    Cancel,
    Delta,
    Detokenize,
    Detokenized,
    Done,
    Failed,
    Flush,
    Flushed,
    FromLaunch,
    Ready,
    Render,
    Rendered,
    Stop,
    Submit,
    ToApi,
    Tokenize,
    Tokenized,
    TokenText,
    ToLaunch,
    ToText,
)
from hybserve.core.types import CacheTruth, ServingFacts, Timing
from hybserve.wire.channel import AsyncChannel, ChannelClosed
from hybserve.wire.codec import Codec

FACTS = ServingFacts(
    served_names=("tiny", "org/tiny"),
    model_dir="/secret/place",
    family="qwen3_5",
    vocab_size=1000,
    max_seq_len=4096,
    max_running=8,
    page_size=64,
    capacity_tokens=4096,
    eos_ids=(2,),
    bos_id=None,
    sampling_defaults={"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    sampling_source="generation_config.json",
    created=1_700_000_000,
    version="0.1.0",
)


class FakeText:
    """Answers like the text role, from a script. ``hold``: stop before the token of that number until ``release``."""

    def __init__(self, channel: AsyncChannel[ToText, ToApi]) -> None:
        self.channel = channel
        self.received: list[Any] = []
        self.words = ["Hello", " wor", "ld", "!"]
        self.refusal: ErrorBody | None = None
        self.fail_after: tuple[int, ErrorBody] | None = None
        self.hold_accept = False
        self.hold_at: int | None = None
        self.released = asyncio.Event()
        self.cancelled: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def submits(self) -> list[Submit]:
        return [m for m in self.received if isinstance(m, Submit)]

    async def run(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                for message in await self.channel.receive():
                    self.received.append(message)
                    self.answer(message)

    def answer(self, message: Any) -> None:
        match message:
            case Submit():
                task = asyncio.create_task(self.generate(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Cancel():
                self.cancelled.add(message.uid)
            case Tokenize():
                text = getattr(message.prompt, "text", "chat")
                strs = list(text) if message.return_token_strs else None
                self.channel.send([Tokenized(message.uid, [ord(c) % 1000 for c in text], strs)])
            case Detokenize():
                self.channel.send([Detokenized(message.uid, "".join(map(chr, message.ids)))])
            case Render() if self.refusal is not None:
                self.channel.send([Failed(message.uid, self.refusal)])
            case Render():
                cache = CacheTruth(kv_hit=128, state_hit=64, hit=64, reason="no_checkpoint", at=64, device=64)
                self.channel.send([Rendered(message.uid, "<user>hi", [5, 6, 7], cache)])
            case Flush():
                self.channel.send([Flushed(message.uid, 12, 3)])

    async def generate(self, submit: Submit) -> None:
        uid = submit.uid
        if self.refusal is not None:
            self.channel.send([Failed(uid, self.refusal)])
            return
        if self.hold_accept:
            await self.released.wait()
        ids = [5, 6, 7] if submit.return_token_ids or submit.echo else None
        self.channel.send([Accepted(uid, 3, ids)])
        limit = submit.sampling.max_tokens or 10**9
        words = self.words[:limit]
        for position, word in enumerate(words):
            if self.hold_at == position:
                await self.released.wait()
            if uid in self.cancelled:
                return
            if self.fail_after is not None and self.fail_after[0] == position:
                await asyncio.sleep(0.05)  # let the headers leave
                self.channel.send([Failed(uid, self.fail_after[1])])
                return
            last = position == len(words) - 1
            reason = ("length" if len(words) == limit else "stop") if last else None
            deltas = [self.delta(submit, choice, position, word, reason) for choice in range(submit.n)]
            self.channel.send(deltas)
            await asyncio.sleep(0)
        cache = CacheTruth(kv_hit=2, hit=1, reason="no_checkpoint", device=1)
        done = Done(uid, 3, submit.n * len(words), cache, Timing(1.0, 0.0, 2.0, 3.0, 100.0))
        self.channel.send([done])

    def delta(self, submit: Submit, choice: int, position: int, word: str, reason: str | None) -> Delta:
        logprobs = None
        if submit.sampling.logprobs >= 0:
            top = tuple((f"t{i}", b"t", -1.0 - i) for i in range(submit.sampling.logprobs))
            logprobs = [
                TokenText(10 + position, word, word.encode(), -0.5 if position else float("-inf"), top, position)
            ]
        ids = [10 + position] if submit.return_token_ids else None
        return Delta(submit.uid, choice, word, 1, ids, logprobs, reason)


class Live:
    """A running api role with its fake text and parent, on a thread of its own."""

    def __init__(self, settings: ApiSettings, facts: ServingFacts, ready: bool) -> None:
        self.settings, self.facts, self._ready = settings, facts, ready
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.failure: Exception | None = None  # what ended the role
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(20)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        parent, child = socket.socketpair()
        text_link: AsyncChannel[ToApi, ToText] = AsyncChannel(ours, Codec(ToApi), Codec(ToText))
        self.text = FakeText(AsyncChannel(theirs, Codec(ToText), Codec(ToApi)))
        control: AsyncChannel[FromLaunch, ToLaunch] = AsyncChannel(child, Codec(FromLaunch), Codec(ToLaunch))
        self.parent: AsyncChannel[ToLaunch, FromLaunch] = AsyncChannel(parent, Codec(ToLaunch), Codec(FromLaunch))
        self.role = ApiRole(self.settings, self.facts, text_link, control)
        text = asyncio.create_task(self.text.run())
        serving = asyncio.create_task(self.role.serve([self.listener]))
        while not self.role.server.started:
            await asyncio.sleep(0.001)
        if self._ready:
            self.text.channel.send([Ready("engine")])
            while not self.role.status.engine_ready:
                await asyncio.sleep(0.001)
        self._started.set()
        try:
            await serving
        except Exception as error:
            self.failure = error
        finally:
            text.cancel()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run on the server's loop and return the result."""
        done: asyncio.Future[Any] | Any = asyncio.run_coroutine_threadsafe(_run(function, args), self.loop)
        return done.result(10)

    def tell(self, *messages: Any) -> None:
        """As text, send to the api."""
        self.call(self.text.channel.send, list(messages))

    def stop(self, order: Any = None, timeout: float = 20) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self.call(self.parent.send, [order or Stop()])
        self.join(timeout)

    def join(self, timeout: float = 20) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive()

    def wait(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        """Until ``condition`` holds on the server's loop."""

        async def poll() -> None:
            async with asyncio.timeout(seconds):
                while not condition():
                    await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(poll(), self.loop).result(seconds + 5)

    # a small client

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def raw(self, data: bytes) -> bytes:
        """Send bytes, read until the server closes."""
        with self.connect() as sock:
            with contextlib.suppress(OSError):
                sock.sendall(data)
            return read_all(sock)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(payload)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return parse_response(self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + payload))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
        status, got, data = self.request("POST", path, body, headers)
        return status, got, json.loads(data) if "json" in got.get("content-type", "") else data

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
        status, got, data = self.request("GET", path, None, headers)
        return status, got, json.loads(data) if "json" in got.get("content-type", "") else data

    def stream(self, path: str, body: Any) -> list[Any]:
        """The events of a streamed answer: parsed JSON, ``[DONE]`` and comments as strings."""
        status, _, data = self.request("POST", path, {**body, "stream": True})
        assert status == 200, data
        return parse_events(data)


async def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = function(*args)
    return await result if asyncio.iscoroutine(result) else result


def read_all(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            parts.append(data)
    return b"".join(parts)


def parse_response(data: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    if headers.get("transfer-encoding") == "chunked":
        rest = unchunk(rest)
    return int(lines[0].split()[1]), headers, rest


def unchunk(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return b"".join(parts)
        parts.append(data[:count])
        data = data[count + 2 :]
    raise AssertionError("the chunked body has no end")


def parse_events(data: bytes) -> list[Any]:
    events: list[Any] = []
    for block in data.decode().split("\n\n"):
        if block.startswith("data: {"):
            events.append(json.loads(block[6:]))
        elif block:
            events.append(block.removeprefix("data: "))
    return events


@pytest.fixture
def facts() -> ServingFacts:
    return FACTS


@pytest.fixture
def serve() -> Iterator[Callable[..., Live]]:
    """Start live servers with settings; all are stopped at the end and must be clean."""
    servers: list[Live] = []

    def start(ready: bool = True, facts: ServingFacts = FACTS, **settings: Any) -> Live:
        servers.append(Live(ApiSettings(**settings), facts, ready))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
        assert server.role.bridge.in_flight == 0
        assert not server.role.bridge._routes


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve()
