"""One HTTP exchange: what the log line and the metrics say about it, and the ASGI helpers of all handlers."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from hybserve.api.errors import error_headers, error_json, header_value
from hybserve.core.errors import ErrorBody
from hybserve.core.types import CacheTruth, Timing

Scope: TypeAlias = MutableMapping[str, Any]
AsgiMessage: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[AsgiMessage]]
Send: TypeAlias = Callable[[AsgiMessage], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


#: Key of the scope under which the protocol offers ``write_chunk(data) -> bool``, a short way for streams.
WRITE_CHUNK = "hybserve.write_chunk"
#: Refusals after which the rest of the request is of no use: the connection ends with them.
CLOSING = frozenset({408, 413, 414, 415, 431})


class ClientGone(Exception):
    """The client hung up; nobody reads an answer."""


class Exchange:
    """State of one request, in ``scope["hybserve"]``."""

    def __init__(self) -> None:
        self.request_id = uuid.uuid4().hex
        self.started = time.monotonic()
        self.tenant = ""
        self.route = "other"
        self.status = 0
        self.outcome = "ok"
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cache: CacheTruth | None = None
        self.timing: Timing | None = None
        self.ignored: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()

    def headers(self) -> Headers:
        """Headers that every answer carries."""
        headers = [(b"x-request-id", self.request_id.encode("ascii"))]
        if self.ignored:
            headers.append((b"x-hybserve-ignored", header_value(self.ignored)))
        if self.warnings:
            headers.append((b"x-hybserve-warning", header_value(self.warnings)))
        return headers


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope["hybserve"]
    return exchange


def header(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header (names are lower case in ASGI)."""
    return [value for key, value in scope["headers"] if key == name]


async def send_json(scope: Scope, send: Send, body: bytes, status: int = 200, extra: Headers | None = None) -> None:
    headers = [JSON, (b"content-length", str(len(body)).encode()), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(
    scope: Scope,
    receive: Receive,
    send: Send,
    error: ErrorBody,
    extra: Headers | None = None,
    linger: float = 0.0,
) -> None:
    """Answer with an error. One that leaves the body unread ends the connection, ``linger`` seconds later at most."""
    exchange_of(scope).outcome = error.code
    headers = [*error_headers(error), *(extra or [])]
    if error.status not in CLOSING:
        await send_json(scope, send, error_json(error), error.status, headers)
        return
    body = error_json(error)
    headers += [JSON, (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if error.status != 408:
        await _drop_body(receive, linger)
    await send({"type": "http.response.body", "body": b""})


async def _drop_body(receive: Receive, linger: float) -> None:
    try:
        async with asyncio.timeout(linger):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        return
