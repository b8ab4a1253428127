"""Answering a generation request: whole or as a stream, with the client watched all the while.

Headers leave only when every prompt has been accepted, so admission errors keep their HTTP status. After that an
error is an event in the stream, and every stream ends with ``[DONE]``.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable

from hybserve.api import sse
from hybserve.api.bridge import Bridge, Call, Event, Gone, Ping, unexpected
from hybserve.api.errors import internal
from hybserve.api.exchange import WRITE_CHUNK, ClientGone, Exchange, Receive, Scope, Send, exchange_of, send_json
from hybserve.api.render import Answer, Totals
from hybserve.api.schema import Order
from hybserve.core.errors import ErrorBody, RequestError
from hybserve.core.messages import Accepted, Delta, Done, Failed

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_call(bridge: Bridge, receive: Receive, prompts: int) -> AsyncIterator[Call]:
    """A call that is cancelled when the block ends early and hears when the client hangs up."""
    call = bridge.open(prompts)
    watcher = asyncio.create_task(_watch(receive, call))
    try:
        yield call
    finally:
        watcher.cancel()
        bridge.close(call)


async def _watch(receive: Receive, call: Call) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call.hang_up()


async def generate(
    order: Order, bridge: Bridge, scope: Scope, receive: Receive, send: Send, request_timeout: float
) -> None:
    """Submit, collect, answer."""
    exchange = exchange_of(scope)
    exchange.ignored, exchange.warnings = order.ignored, order.warnings
    exchange.request_id = order.request_id or exchange.request_id
    async with open_call(bridge, receive, len(order.prompts)) as call:
        bridge.send(order.submits(call.uids, exchange.tenant, request_timeout))
        accepted = await _accepted(call)
        answer_id = ("chatcmpl-" if order.chat else "cmpl-") + uuid.uuid4().hex
        if order.stream:
            await _Stream(order, call, scope, send, answer_id).run(accepted)
        else:
            await _whole(order, call, exchange, scope, send, answer_id, accepted)


async def _accepted(call: Call) -> list[Event]:
    """The events up to the one with which the last prompt was heard of. Raises the first refusal."""
    events: list[Event] = []
    heard: set[int] = set()
    while len(heard) < len(call.uids):
        for event in await call.events():
            prompt, reply = event
            match reply:
                case Gone():
                    raise ClientGone
                case Failed():
                    raise RequestError(reply.error)
                case Ping():
                    continue
            heard.add(prompt)
            events.append(event)
    return events


def _note(exchange: Exchange, totals: Totals) -> None:
    exchange.prompt_tokens, exchange.completion_tokens = totals.prompt_tokens, totals.completion_tokens
    exchange.cache, exchange.timing = totals.cache, totals.timing


async def _whole(
    order: Order, call: Call, exchange: Exchange, scope: Scope, send: Send, answer_id: str, events: list[Event]
) -> None:
    answer = Answer(order)
    missing = len(order.prompts)
    while True:
        for prompt, reply in events:
            match reply:
                case Delta():
                    answer.add(prompt, reply)
                case Accepted():
                    answer.accept(prompt, reply)
                case Done():
                    answer.totals.add(reply)
                    missing -= 1
                case Failed():
                    raise RequestError(reply.error)
                case Gone():
                    raise ClientGone
                case Ping():
                    pass
                case _:
                    raise RequestError(unexpected(reply))
        if not missing:
            break
        events = await call.events()
    _note(exchange, answer.totals)
    exchange.outcome = answer.choices[0].finish_reason or "stop"
    await send_json(scope, send, answer.body(answer_id, int(time.time())))


class _Stream:
    """One event stream, from its headers to ``[DONE]``."""

    def __init__(self, order: Order, call: Call, scope: Scope, send: Send, answer_id: str) -> None:
        self._order, self._call, self._exchange, self._send = order, call, exchange_of(scope), send
        self._write_chunk: Callable[[bytes], bool] = scope.get(WRITE_CHUNK, _no_short_way)
        self._encoder = sse.ChunkEncoder(order, answer_id, int(time.time()))
        self._totals = Totals(len(order.prompts) * order.n)
        self._missing = len(order.prompts)

    async def run(self, events: list[Event]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
        self._call.wants_pings = True
        try:
            await self._forward(events)
        except RequestError as error:
            await self._end_with(error.body)
        except ClientGone:
            raise
        except Exception:
            logger.exception("a stream failed")
            await self._end_with(internal().body)

    async def _forward(self, events: list[Event]) -> None:
        while True:
            out = [chunk for prompt, reply in events if (chunk := self._chunk(prompt, reply))]
            if not self._missing:
                if self._order.include_usage:
                    out.append(self._encoder.usage(self._totals))
                _note(self._exchange, self._totals)
                await self._write(b"".join([*out, sse.DONE]), more=False)
                return
            if out:
                data = b"".join(out)
                if not self._write_chunk(data):
                    await self._write(data)
            events = await self._call.events()

    def _chunk(self, prompt: int, reply: object) -> bytes:
        match reply:
            case Delta():
                if reply.finish_reason is not None:
                    self._exchange.outcome = reply.finish_reason
                return self._encoder.delta(prompt, reply)
            case Accepted():
                self._encoder.accept(prompt, reply)
            case Done():
                self._totals.add(reply)
                self._missing -= 1
            case Ping():
                return sse.PING
            case Gone():
                raise ClientGone
            case Failed():
                raise RequestError(reply.error)
            case _:
                raise RequestError(unexpected(reply))
        return b""

    async def _end_with(self, error: ErrorBody) -> None:
        self._exchange.outcome = error.code
        _note(self._exchange, self._totals)
        await self._write(sse.error_event(error) + sse.DONE, more=False)

    async def _write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _no_short_way(data: bytes) -> bool:
    """Servers other than our own protocol (in-process tests) have only ``send``."""
    return False
