"""Server-sent events of one stream, encoded so that a plain token costs one small JSON string.

The order clients rely on: the role rides with the first token of a choice; the chunk with ``finish_reason`` has no
usage; the usage chunk has no choices and comes only when asked for; ``[DONE]`` ends every stream, after errors too.
"""

from typing import Any

import msgspec

from hybserve.api.errors import error_json
from hybserve.api.render import Totals, chat_logprobs, completion_logprobs, usage_body
from hybserve.api.schema import Order
from hybserve.core.errors import ErrorBody
from hybserve.core.messages import Accepted, Delta

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.encode


def error_event(error: ErrorBody) -> bytes:
    return b"data: " + error_json(error) + b"\n\n"


class ChunkEncoder:
    """Encodes the chunks of one stream. Choice ``prompt * n + k``, as in whole answers."""

    def __init__(self, order: Order, answer_id: str, created: int) -> None:
        self._order = order
        kind = "chat.completion.chunk" if order.chat else "text_completion"
        head = _encode({"id": answer_id, "object": kind, "created": created, "model": order.model})[:-1]
        self._head = b"data: " + head
        count = len(order.prompts) * order.n
        self._starts = [self._choice_start(index) for index in range(count)]
        self._fresh = [True] * count
        self._completion_tokens = 0
        self._prompt_tokens = 0
        self._prompt_ids: dict[int, list[int]] = {}
        usage = b',"usage":null' if order.include_usage else b""
        text_end = b"}" if order.chat else b""
        self._plain_end = text_end + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._plain = not (order.continuous_usage or order.return_token_ids or order.sampling.logprobs >= 0)

    def _choice_start(self, index: int) -> bytes:
        start = self._head + b',"choices":[{"index":%d,' % index
        return start + (b'"delta":{"content":' if self._order.chat else b'"text":')

    def accept(self, prompt: int, accepted: Accepted) -> None:
        self._prompt_tokens += accepted.prompt_tokens
        if self._order.return_token_ids and accepted.prompt_ids is not None:
            self._prompt_ids[prompt] = accepted.prompt_ids

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The chunk of one delta."""
        index = prompt * self._order.n + delta.choice
        if self._plain and delta.finish_reason is None and not self._fresh[index]:
            return self._starts[index] + _encode(delta.text) + self._plain_end
        return self._full(prompt, index, delta)

    def _full(self, prompt: int, index: int, delta: Delta) -> bytes:
        order, fresh = self._order, self._fresh[index]
        self._fresh[index] = False
        self._completion_tokens += delta.tokens
        choice: dict[str, Any] = {"index": index}
        if order.chat:
            choice["delta"] = _chat_delta(delta, fresh)
        else:
            choice["text"] = delta.text
        choice["logprobs"] = None
        if order.sampling.logprobs >= 0 and delta.logprobs:
            choice["logprobs"] = (chat_logprobs if order.chat else completion_logprobs)(delta.logprobs)
        choice["finish_reason"] = delta.finish_reason
        if order.return_token_ids:
            choice["token_ids"] = delta.token_ids or []
        body: dict[str, Any] = {"choices": [choice]}
        if fresh and delta.choice == 0 and prompt in self._prompt_ids:
            (body if len(order.prompts) == 1 else choice)["prompt_token_ids"] = self._prompt_ids.pop(prompt)
        if order.continuous_usage and delta.finish_reason is None:
            body["usage"] = usage_body(self._prompt_tokens, self._completion_tokens)
        elif order.include_usage:
            body["usage"] = None
        return self._head + b"," + _encode(body)[1:] + b"\n\n"

    def usage(self, totals: Totals) -> bytes:
        body = {"choices": [], "usage": totals.usage(), "hybserve": totals.hybserve()}
        return self._head + b"," + _encode(body)[1:] + b"\n\n"


def _chat_delta(delta: Delta, fresh: bool) -> dict[str, str]:
    body = {"role": "assistant"} if fresh else {}
    if delta.text or fresh or delta.finish_reason is None:
        body["content"] = delta.text
    return body
