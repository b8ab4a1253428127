"""Reading request bodies: counted, timed, and bounded over all connections together."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from hybserve.api.errors import body_too_large, too_many_bodies, too_slow
from hybserve.api.exchange import ClientGone, Receive, Scope, header
from hybserve.api.jsonbody import parse_object
from hybserve.api.settings import ApiSettings
from hybserve.core.errors import invalid_value

T = TypeVar("T")

#: Bodies above this size are parsed off the event loop.
LARGE_BODY = 1 << 18
#: All bodies being received at one time may hold this many of the largest ones.
LARGEST_AT_ONCE = 8


class BodyReader:
    """Reads JSON bodies for one server."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._held = 0  # bytes of bodies that are being received or parsed

    async def read(self, scope: Scope, receive: Receive, build: Callable[[dict[str, Any]], T]) -> T:
        """What ``build`` makes of the JSON object in the body; both run off the loop when the body is large.

        Raises RequestError (400, 408, 413, 503, and what ``build`` raises) or ClientGone.
        """
        self._check_length(scope)
        settings = self._settings
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(settings.body_timeout):
                await self._collect(receive, chunks)
            return await _parse(b"".join(chunks), build)
        except TimeoutError:
            raise too_slow(settings.body_timeout) from None
        finally:
            self._held -= sum(map(len, chunks))

    def _check_length(self, scope: Scope) -> None:
        limit = self._settings.max_body
        for value in header(scope, b"content-length"):
            if not value.isdigit():
                raise invalid_value("Content-Length is not a number.")
            if len(value) > 18 or int(value) > limit:
                raise body_too_large(limit)

    async def _collect(self, receive: Receive, chunks: list[bytes]) -> None:
        limit, size = self._settings.max_body, 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise body_too_large(limit)
            chunks.append(chunk)
            self._held += len(chunk)
            if self._held > limit * LARGEST_AT_ONCE:
                raise too_many_bodies()
            if not message.get("more_body", False):
                return


async def _parse(raw: bytes, build: Callable[[dict[str, Any]], T]) -> T:
    if len(raw) > LARGE_BODY:
        return await asyncio.to_thread(lambda: build(parse_object(raw)))
    return build(parse_object(raw))
