"""The outermost ASGI layer: limits, path folding, keys, one answer for every failure, one log line per request."""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Router

from hybserve.api.auth import LOCAL_PATHS, OPEN_PATHS, authorise
from hybserve.api.errors import (
    encoding_unsupported,
    headers_too_large,
    internal,
    method_not_allowed,
    route_not_found,
    too_many_connections,
    url_too_long,
)
from hybserve.api.exchange import AsgiMessage, ClientGone, Exchange, Receive, Scope, Send, header, send_error
from hybserve.api.schema import usable_request_id
from hybserve.api.settings import ApiSettings
from hybserve.core.errors import RequestError
from hybserve.observe.log import log_request
from hybserve.observe.metrics import Metrics, labelled

logger = logging.getLogger(__name__)
_SLASHES = re.compile("/{2,}")
#: nginx's status for "client closed the request"; only ever in logs and metrics.
CLIENT_GONE = 499


class Front:
    """``app`` of the server. ``routes`` is the routing table, for tests that enumerate it."""

    def __init__(self, router: Router, settings: ApiSettings, metrics: Metrics) -> None:
        self._router = router
        self._settings = settings
        self._metrics = metrics
        self._in_flight = 0

    @property
    def routes(self) -> list[BaseRoute]:
        return self._router.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        exchange = scope["hybserve"] = Exchange()
        scope["app"] = self  # makes the router raise on a wrong method instead of answering in plain text
        scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
        self._gauge(1)
        try:
            await self._answer(scope, receive, _Sender(exchange, send))
        except ClientGone:
            exchange.status, exchange.outcome = CLIENT_GONE, "client_disconnect"
        finally:
            self._gauge(-1)
            self._record(scope, exchange)

    async def _answer(self, scope: Scope, receive: Receive, send: "_Sender") -> None:
        try:
            self._check(scope)
            scope["hybserve"].route = self._route_label(scope)
            await self._router(scope, receive, send)
        except ClientGone:
            raise
        except RequestError as error:
            extra = [(b"connection", b"close")] if _is_over_limit(scope) else None
            await send_error(scope, receive, send, error.body, extra, linger=self._settings.linger)
        except HTTPException as error:
            await self._routing_error(scope, receive, send, error)
        except Exception:
            logger.exception("a request failed")
            if send.started:
                raise
            await send_error(scope, receive, send, internal().body)

    def _check(self, scope: Scope) -> None:
        settings, headers = self._settings, scope["headers"]
        exchange = scope["hybserve"]
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > settings.max_url:
            raise url_too_long(settings.max_url)
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if size > settings.max_header_bytes or len(headers) > settings.max_headers:
            raise headers_too_large(settings.max_header_bytes)
        for value in header(scope, b"x-request-id")[:1]:
            exchange.request_id = usable_request_id(value) or exchange.request_id
        exchange.tenant = authorise(scope, settings)
        if _is_over_limit(scope) and scope["path"] not in OPEN_PATHS | LOCAL_PATHS:
            raise too_many_connections()
        if any(value.strip().lower() not in (b"", b"identity") for value in header(scope, b"content-encoding")):
            raise encoding_unsupported()

    def _route_label(self, scope: Scope) -> str:
        for route in self._router.routes:
            if route.matches(scope)[0] is not Match.NONE:
                return str(getattr(route, "path", "other"))
        return "other"

    async def _routing_error(self, scope: Scope, receive: Receive, send: Send, error: HTTPException) -> None:
        if error.status_code == 405:
            allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
            refusal = method_not_allowed(scope["method"], allowed).body
            await send_error(scope, receive, send, refusal, [(b"allow", allowed.encode())])
        else:
            await send_error(scope, receive, send, route_not_found(scope["path"]).body)

    def _gauge(self, change: int) -> None:
        self._in_flight += change
        self._metrics.gauge("hybserve_http_requests_in_flight", self._in_flight)

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        seconds = time.monotonic() - exchange.started
        name = labelled("hybserve_http_requests_total", route=exchange.route, status=str(exchange.status))
        self._metrics.count(name)
        if exchange.route.startswith("/v1/"):
            self._metrics.histogram("hybserve_http_request_seconds").observe(seconds)
        if exchange.route in OPEN_PATHS | LOCAL_PATHS and exchange.status < 500:
            return  # probes would drown everything else
        log_request(
            logger,
            request_id=exchange.request_id,
            route=exchange.route,
            status=exchange.status,
            outcome=exchange.outcome,
            prompt_tokens=exchange.prompt_tokens,
            completion_tokens=exchange.completion_tokens,
            cache=exchange.cache,
            timing=exchange.timing,
            method=scope["method"],
            seconds=round(seconds, 4),
        )


def _is_over_limit(scope: Scope) -> bool:
    """Whether the protocol marked this connection as one too many."""
    return bool((scope.get("state") or {}).get("over_limit"))


class _Sender:
    """``send`` that adds the headers of every answer and remembers the status."""

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self._exchange = exchange
        self._send = send
        self.started = False

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._exchange.status = message["status"]
            message["headers"] = [*message["headers"], *self._exchange.headers()]
        await self._send(message)


async def no_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise route_not_found(scope["path"])


class Handler:
    """An ASGI endpoint for a route (the router wraps plain functions in request objects, instances not)."""

    def __init__(self, function: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._function = function

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._function(scope, receive, send)


def table(paths: Iterable[BaseRoute]) -> Router:
    return Router(routes=list(paths), redirect_slashes=False, default=no_route)
