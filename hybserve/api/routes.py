"""The routes of the server. Handlers read a body, talk to text through the bridge, and answer; nothing else."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route

from hybserve.api.body import BodyReader
from hybserve.api.bridge import Bridge, Gone, unexpected
from hybserve.api.errors import error_headers
from hybserve.api.exchange import ClientGone, Receive, Scope, Send, exchange_of, send_json
from hybserve.api.front import Handler
from hybserve.api.generation import generate, open_call
from hybserve.api.metrics import CONTENT_TYPE, render_metrics
from hybserve.api.render import cache_body
from hybserve.api.schema import Order, Schema
from hybserve.api.settings import ApiSettings
from hybserve.core.errors import RequestError, invalid_value, model_not_found
from hybserve.core.messages import (
    Detokenize,
    Detokenized,
    Failed,
    Flush,
    Flushed,
    Render,
    Rendered,
    Tokenize,
    Tokenized,
)
from hybserve.core.types import ServingFacts
from hybserve.observe.metrics import Metrics

T = TypeVar("T")


class Routes:
    """All handlers over one bridge."""

    def __init__(self, facts: ServingFacts, settings: ApiSettings, bridge: Bridge, metrics: Metrics) -> None:
        self._facts = facts
        self._settings = settings
        self._bridge = bridge
        self._metrics = metrics
        self._bodies = BodyReader(settings)
        self._schema = Schema(facts, allow_request_template=settings.allow_request_template)

    def table(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", Handler(self.chat), methods=["POST"]),
            Route("/v1/completions", Handler(self.completions), methods=["POST"]),
            Route("/v1/chat/completions/render", Handler(self.render_chat), methods=["POST"]),
            Route("/v1/completions/render", Handler(self.render_completion), methods=["POST"]),
            Route("/v1/models", Handler(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", Handler(self.model), methods=["GET"]),
            Route("/tokenize", Handler(self.tokenize), methods=["POST"]),
            Route("/detokenize", Handler(self.detokenize), methods=["POST"]),
            Route("/health", Handler(self.health), methods=["GET"]),
            Route("/health/ready", Handler(self.ready), methods=["GET"]),
            Route("/metrics", Handler(self.metrics), methods=["GET"]),
            Route("/version", Handler(self.version), methods=["GET"]),
            Route("/flush_cache", Handler(self.flush_cache), methods=["POST"]),
        ]

    # generation

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = await self._body(scope, receive, self._schema.chat)
        await generate(order, self._bridge, scope, receive, send, self._settings.request_timeout)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = await self._body(scope, receive, self._schema.completion)
        await generate(order, self._bridge, scope, receive, send, self._settings.request_timeout)

    # text

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        prompt, specials, strs = await self._body(scope, receive, self._schema.tokenize)
        reply = await self._ask(receive, lambda uid: Tokenize(uid, prompt, specials, strs))
        if not isinstance(reply, Tokenized):
            raise RequestError(unexpected(reply))
        body = {
            "count": len(reply.ids),
            "max_model_len": self._facts.max_seq_len,
            "tokens": reply.ids,
            "token_strs": reply.strs,
        }
        await send_json(scope, send, msgspec.json.encode(body))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        ids = await self._body(scope, receive, self._schema.detokenize)
        reply = await self._ask(receive, lambda uid: Detokenize(uid, ids))
        if not isinstance(reply, Detokenized):
            raise RequestError(unexpected(reply))
        await send_json(scope, send, msgspec.json.encode({"prompt": reply.text}))

    async def render_chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._render(await self._body(scope, receive, self._schema.chat), scope, receive, send)

    async def render_completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._render(await self._body(scope, receive, self._schema.completion), scope, receive, send)

    async def _render(self, order: Order, scope: Scope, receive: Receive, send: Send) -> None:
        """The prompt of a request as the model would read it, and which of it is cached for this client now."""
        exchange = exchange_of(scope)
        exchange.ignored, exchange.warnings = order.ignored, order.warnings
        exchange.request_id = order.request_id or exchange.request_id
        if len(order.prompts) != 1:
            raise invalid_value("Only one prompt can be rendered at a time.", "prompt")
        prompt, specials = order.prompts[0], order.add_special_tokens
        reply = await self._ask(receive, lambda uid: Render(uid, prompt, specials, exchange.tenant, order.cache_salt))
        if not isinstance(reply, Rendered):
            raise RequestError(unexpected(reply))
        exchange.prompt_tokens, exchange.cache = len(reply.ids), reply.cache
        body = {
            "text": reply.text,
            "token_ids": reply.ids,
            "tokens": len(reply.ids),
            "hybserve": {"cache": cache_body(reply.cache)},
        }
        await send_json(scope, send, msgspec.json.encode(body))

    # cache

    async def flush_cache(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forget what is cached; a body is not needed and not read."""
        reply = await self._ask(receive, Flush)
        if not isinstance(reply, Flushed):
            raise RequestError(unexpected(reply))
        await send_json(scope, send, msgspec.json.encode({"pages": reply.pages, "states": reply.states}))

    async def _ask(self, receive: Receive, message: Any) -> object:
        """One question to text and its one reply. Raises what text refuses with."""
        async with open_call(self._bridge, receive, 1) as call:
            self._bridge.send([message(call.uids[0])])
            _, reply = (await call.events())[0]
        match reply:
            case Gone():
                raise ClientGone
            case Failed():
                raise RequestError(reply.error)
        return reply

    async def _body(self, scope: Scope, receive: Receive, build: Callable[[dict[str, Any]], T]) -> T:
        self._bridge.status.admit()
        return await self._bodies.read(scope, receive, build)

    # facts

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = [self._model_body(name) for name in self._facts.served_names]
        await send_json(scope, send, msgspec.json.encode({"object": "list", "data": data}))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name: str = scope["path_params"]["name"]
        if name not in self._facts.served_names:
            raise model_not_found(name if len(name) <= 64 else name[:61] + "...", list(self._facts.served_names))
        await send_json(scope, send, msgspec.json.encode(self._model_body(name)))

    def _model_body(self, name: str) -> dict[str, Any]:
        facts = self._facts
        return {
            "id": name,
            "object": "model",
            "created": facts.created,
            "owned_by": "hybserve",
            "root": facts.served_names[0],
            "parent": None,
            "max_model_len": facts.max_seq_len,
            "hybserve": {
                "family": facts.family,
                "vocab_size": facts.vocab_size,
                "page_size": facts.page_size,
                "max_running": facts.max_running,
                "capacity_tokens": facts.capacity_tokens,
                "sampling_defaults": facts.sampling_defaults,
                "sampling_source": facts.sampling_source,
                "version": facts.version,
            },
        }

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(scope, send, msgspec.json.encode({"version": self._facts.version}))

    # state

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Live: 200 while the process and its engine can still come to serve."""
        trouble = self._bridge.status.trouble()
        if trouble is not None:
            raise RequestError(trouble)
        await send_json(scope, send, msgspec.json.encode({"status": "ok"}))

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ready: 200 when a request would be taken; else 503 with the reason, the stage and its progress."""
        status = self._bridge.status
        body: dict[str, Any] = {"status": status.name, "stage": status.stage, "progress": round(status.progress, 4)}
        refusal = status.refusal()
        if refusal is None:
            await send_json(scope, send, msgspec.json.encode(body))
            return
        exchange_of(scope).outcome = refusal.code
        body["error"] = {"message": refusal.message, "type": refusal.type, "param": None, "code": refusal.code}
        await send_json(scope, send, msgspec.json.encode(body), 503, error_headers(refusal))

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        snapshots = [*self._bridge.snapshots.values(), self._metrics.snapshot()]
        body = render_metrics(snapshots, self._facts.served_names[0])
        headers = [(b"content-type", CONTENT_TYPE), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
