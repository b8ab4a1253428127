"""A minimal HTTP/1.1 client for load generation: one streamed POST per call, connections kept, times of every event.

A protocol rather than streams: an event costs a few microseconds, so that one core can drive a busy server.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Reply:
    """What came back: arrival times (seconds, monotonic) of events with choices, usage, or what went wrong."""

    status: int = 0
    started: float = 0.0
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    usage: dict[str, Any] | None = None
    error: str | None = None
    finished: bool = False  # the stream ended with [DONE]
    kept: list[bytes] | None = None  # JSON of every event with choices, if asked for


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.usable = True
        self._buffer = bytearray()
        self._reply = Reply()
        self._done: asyncio.Future[None] | None = None
        self._in_body = False
        self._left: int | None = None  # bytes of a body with a length, None = chunked
        self._text = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._fail("the server closed the connection")

    async def post(self, request: bytes, reply: Reply, timeout: float) -> None:
        assert self.transport is not None
        self._reply, self._in_body = reply, False
        self._buffer.clear()
        self._text.clear()
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            async with asyncio.timeout(timeout):
                await self._done
        except TimeoutError:
            reply.error = "timeout"
            self.usable = False
        finally:
            reply.ended = time.monotonic()
            self._done = None
            if not self.usable:
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._buffer += data
        try:
            if not self._in_body and not self._read_head():
                return
            if self._read_body(now):
                self._finish()
        except ValueError as error:
            self.usable = False
            self._fail(f"not the HTTP that was expected: {error}")

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        self._reply.status = int(lines[0].split()[1])
        self.usable = headers.get("connection", "").lower() != "close"
        self._left = None if headers.get("transfer-encoding") == "chunked" else int(headers["content-length"])
        self._in_body = True
        return True

    def _read_body(self, now: float) -> bool:
        """Move what arrived into events; true when the body is whole."""
        if self._left is not None:
            take = min(self._left, len(self._buffer))
            self._text += self._buffer[:take]
            del self._buffer[:take]
            self._left -= take
            self._read_events(now)
            return self._left == 0
        while (line_end := self._buffer.find(b"\r\n")) >= 0:
            size = int(self._buffer[:line_end], 16)
            if len(self._buffer) < line_end + 2 + size + 2:
                break
            self._text += self._buffer[line_end + 2 : line_end + 2 + size]
            del self._buffer[: line_end + 2 + size + 2]
            self._read_events(now)
            if size == 0:
                return True
        return False

    def _read_events(self, now: float) -> None:
        if self._reply.status != 200:
            return
        *blocks, rest = bytes(self._text).split(b"\n\n")
        self._text = bytearray(rest)
        for block in blocks:
            if block == b"data: [DONE]":
                self._reply.finished = True
            elif block.startswith(b"data: "):
                self._event(block[6:], now)

    def _event(self, data: bytes, now: float) -> None:
        if b'"choices":[{' in data:  # a token; its content does not matter here
            self._reply.times.append(now)
            if self._reply.kept is not None:
                self._reply.kept.append(data)
            return
        event = json.loads(data)
        if "error" in event:
            self._reply.error = str(event["error"].get("message"))
        elif event.get("choices"):
            self._reply.times.append(now)
        if event.get("usage"):
            self._reply.usage = event["usage"]

    def _finish(self) -> None:
        reply = self._reply
        if reply.status != 200:
            reply.error = bytes(self._text[:300]).decode("utf-8", "replace")
        elif not reply.finished and reply.error is None:
            reply.error = "the stream ended without [DONE]"
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, what: str) -> None:
        if self._done is not None and not self._done.done():
            self._reply.error = what
            self._done.set_result(None)


class Client:
    """Posts to one server; idle connections are kept and reused."""

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"expected a URL such as http://127.0.0.1:8000, got {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._auth = f"Authorization: Bearer {key}\r\n" if key else ""
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def post(self, path: str, payload: bytes, started: float | None = None, keep: bool = False) -> Reply:
        """One streamed answer to a JSON body. ``started``: when the request should have been sent (open loop), default
        now. ``keep``: the events stay in the reply."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._auth}"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        reply = Reply(started=time.monotonic() if started is None else started, kept=[] if keep else None)
        try:
            connection = await self._connection()
        except OSError as error:
            reply.ended, reply.error = time.monotonic(), f"cannot connect: {error.strerror}"
            return reply
        await connection.post(head.encode() + payload, reply, self._timeout)
        if connection.usable:
            self._idle.append(connection)
        return reply

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.abort()
