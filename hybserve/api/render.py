"""Bodies of answers: usage, the ``hybserve`` block, log-probabilities, and whole (not streamed) completions."""

import math
from typing import Any

import msgspec

from hybserve.api.schema import Order
from hybserve.core.messages import Accepted, Delta, Done, TokenText
from hybserve.core.types import LOGPROB_FLOOR, CacheTruth, Timing


class Totals:
    """Sums over the prompts of one HTTP request, as their terminal events come in."""

    def __init__(self, choices: int) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cache: CacheTruth | None = None
        self.timing: Timing | None = None
        self._choices = choices

    def add(self, done: Done) -> None:
        self.prompt_tokens += done.prompt_tokens
        self.completion_tokens += done.completion_tokens
        self.cache = done.cache if self.cache is None else _add_caches(self.cache, done.cache)
        self.timing = done.timing if self.timing is None else _slowest(self.timing, done.timing)

    def usage(self) -> dict[str, Any]:
        body: dict[str, Any] = usage_body(self.prompt_tokens, self.completion_tokens)
        body["prompt_tokens_details"] = {"cached_tokens": self.cache.hit if self.cache else 0}
        return body

    def hybserve(self) -> dict[str, Any]:
        """The block beside usage: cache truth and where the time went."""
        timing = self.timing or Timing()
        decoded = max(self.completion_tokens - self._choices, 0)
        rate = round(1000 * decoded / timing.decode, 1) if timing.decode > 0 else 0.0
        return {
            "cache": cache_body(self.cache or CacheTruth()),
            "timing_ms": {key: round(value, 3) for key, value in msgspec.structs.asdict(timing).items()},
            "tok_per_s": rate,
        }


def cache_body(cache: CacheTruth) -> dict[str, Any]:
    return {
        "kv_hit": cache.kv_hit,
        "state_hit": cache.state_hit,
        "hit": cache.hit,
        "reason": cache.reason,
        "at": cache.at,
        "tiers": {"device": cache.device, "host": cache.host, "file": cache.file},
    }


def usage_body(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _add_caches(a: CacheTruth, b: CacheTruth) -> CacheTruth:
    """Tokens add up over prompts; the first prompt's reason stands for all."""
    keys = ("kv_hit", "state_hit", "hit", "device", "host", "file")
    return msgspec.structs.replace(a, **{key: getattr(a, key) + getattr(b, key) for key in keys})


def _slowest(a: Timing, b: Timing) -> Timing:
    return Timing(*(max(x, y) for x, y in zip(msgspec.structs.astuple(a), msgspec.structs.astuple(b), strict=True)))


def safe_logprob(value: float) -> float:
    """JSON has no NaN and no infinity."""
    return max(value, LOGPROB_FLOOR) if math.isfinite(value) else LOGPROB_FLOOR


def chat_logprobs(entries: list[TokenText]) -> dict[str, Any]:
    content = [
        {
            "token": entry.text,
            "logprob": safe_logprob(entry.logprob or 0.0),
            "bytes": list(entry.bytes),
            "top_logprobs": [
                {"token": text, "logprob": safe_logprob(logprob), "bytes": list(raw)}
                for text, raw, logprob in entry.top
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: list[TokenText]) -> dict[str, Any]:
    """The legacy shape. ``top_logprobs`` always contains the token itself, so it may have one entry more."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [None if entry.logprob is None else safe_logprob(entry.logprob) for entry in entries],
        "top_logprobs": [_top_dict(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _top_dict(entry: TokenText) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for text, _, logprob in entry.top:
        top.setdefault(text, safe_logprob(logprob))
    top.setdefault(entry.text, safe_logprob(entry.logprob))
    return top


class Choice:
    """One choice of a whole answer, put together from its deltas."""

    __slots__ = ("_logprobs", "_order", "_text", "_token_ids", "finish_reason")

    def __init__(self, order: Order) -> None:
        self._order = order
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenText] = []
        self.finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        if delta.token_ids:
            self._token_ids += delta.token_ids
        if delta.logprobs:
            self._logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason

    def body(self, index: int) -> dict[str, Any]:
        order, text = self._order, "".join(self._text)
        body: dict[str, Any] = {"index": index}
        if order.chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        wanted = order.sampling.logprobs >= 0
        shape = chat_logprobs if order.chat else completion_logprobs
        body["logprobs"] = shape(self._logprobs) if wanted else None
        body["finish_reason"] = self.finish_reason
        if order.return_token_ids:
            body["token_ids"] = self._token_ids
        return body


class Answer:
    """A whole answer: all choices of all prompts; choice ``prompt * n + k``."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.totals = Totals(len(order.prompts) * order.n)
        self.choices = [Choice(order) for _ in range(len(order.prompts) * order.n)]
        self._prompt_ids: dict[int, list[int]] = {}

    def accept(self, prompt: int, accepted: Accepted) -> None:
        if self._order.return_token_ids and accepted.prompt_ids is not None:
            self._prompt_ids[prompt] = accepted.prompt_ids

    def add(self, prompt: int, delta: Delta) -> None:
        self.choices[prompt * self._order.n + delta.choice].add(delta)

    def body(self, answer_id: str, created: int) -> bytes:
        order = self._order
        choices = [choice.body(index) for index, choice in enumerate(self.choices)]
        body: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion" if order.chat else "text_completion",
            "created": created,
            "model": order.model,
            "choices": choices,
            "usage": self.totals.usage(),
            "hybserve": self.totals.hybserve(),
        }
        if len(order.prompts) == 1 and 0 in self._prompt_ids:
            body["prompt_token_ids"] = self._prompt_ids[0]
        else:
            for prompt, ids in self._prompt_ids.items():
                choices[prompt * order.n]["prompt_token_ids"] = ids
        return msgspec.json.encode(body)
