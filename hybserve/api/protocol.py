"""uvicorn's HTTP/1.1 protocol with the deadlines and limits it does not have.

A connection must bring whole request headers within ``header_timeout`` of its start, or of the first byte of its next
request; a peer that reads nothing for ``write_timeout`` is cut off; what is not HTTP is refused in JSON. By default
uvicorn keeps a silent connection for ever and answers in plain text.
"""

import asyncio
import logging
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hybserve.api.errors import bad_request, error_json, headers_too_large, url_too_long
from hybserve.api.exchange import WRITE_CHUNK, Scope
from hybserve.api.settings import ApiSettings
from hybserve.core.errors import RequestError
from hybserve.observe.metrics import Metrics

logger = logging.getLogger(__name__)

#: Connections beyond the limit that still get an answer (503, or health); above these they are dropped at once.
SPARE_CONNECTIONS = 64


class LimitedProtocol(H11Protocol):
    """One connection. ``settings`` and ``metrics`` come from ``limited_protocol``."""

    settings: ApiSettings
    metrics: Metrics

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, dict(app_state), _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self.settings.max_connections
        if over > SPARE_CONNECTIONS:
            self.metrics.count("hybserve_http_connections_dropped_total")
            transport.abort()
            return
        self.app_state["over_limit"] = over > 0
        self.metrics.gauge("hybserve_http_connections", len(self.connections))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disarm()
        self._stop_write_deadline()
        self.metrics.gauge("hybserve_http_connections", len(self.connections))

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._deadline is None and not self._busy():
            self._arm()
        super().data_received(data)
        if self._busy():
            self._disarm()

    def handle_events(self) -> None:
        super().handle_events()
        if self._busy():
            cast(Scope, self.cycle.scope).setdefault(WRITE_CHUNK, self.write_chunk)

    def write_chunk(self, data: bytes) -> bool:
        """A piece of a streamed body past uvicorn and h11, which cost more than all else that a token costs here.

        False when it has to go the long way: the answer is not chunked, or the peer reads too slowly.
        """
        if self.flow.write_paused or self.conn.their_http_version != b"1.1":
            return False
        if not self.cycle.disconnected and data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def eof_received(self) -> None:
        """A peer that ends its side inside a request gets a 400 if its side of the body is incomplete."""
        if self.cycle is not None and not self.cycle.response_started and self.cycle.more_body:
            self._refuse(bad_request("The request body is shorter than announced."))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._busy() and self.conn.trailing_data[0]:
            self._arm()

    def shutdown(self) -> None:
        """The server ends: close when idle, else after the running answer."""
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # not in a state in which HTTP can end in order
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self.settings.write_timeout, self._unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_deadline()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for anything that is not HTTP, oversized headers included."""
        waiting = self.conn.trailing_data[0]
        if len(waiting) <= self.settings.max_header_bytes:
            self._refuse(bad_request("The request is not valid HTTP/1.1."))
        elif b"\n" in waiting[: self.settings.max_header_bytes]:
            self._refuse(headers_too_large(self.settings.max_header_bytes))
        else:
            self._refuse(url_too_long(self.settings.max_url))

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(self.settings.header_timeout, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        self.metrics.count("hybserve_http_header_timeouts_total")
        self.transport.abort()

    def _unread(self) -> None:
        self.metrics.count("hybserve_http_write_timeouts_total")
        self.transport.abort()

    def _refuse(self, error: RequestError) -> None:
        """Answer outside of the application and close, letting the peer read the answer first."""
        self._refused = True
        self._disarm()
        self._unset_keepalive_if_required()
        if self._busy():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = error_json(error.body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = (h11.Response(status_code=error.body.status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(self.settings.linger, self.transport.close)


def limited_protocol(settings: ApiSettings, metrics: Metrics) -> type[LimitedProtocol]:
    """The protocol class bound to one server's limits (uvicorn makes the instances itself)."""
    return type("BoundProtocol", (LimitedProtocol,), {"settings": settings, "metrics": metrics})
