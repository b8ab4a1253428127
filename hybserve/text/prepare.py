"""Prompts on their way to the scheduler: what is encoded on the spot, what is the worker's, what is refused."""

import time
from collections.abc import Callable

from hybserve.core.errors import context_length_exceeded, invalid_value, unsupported_parameter
from hybserve.core.messages import ChatPrompt, TextPrompt, TokenPrompt
from hybserve.core.types import ServingFacts
from hybserve.observe.metrics import LATENCY_BOUNDS, Metrics
from hybserve.text.tokenize import Tokenizer, too_many_bytes

#: Texts up to this many characters are encoded on the spot (under two milliseconds); the rest goes to the worker.
INLINE_TEXT = 2048
#: … and no more than this of them in one turn: a batch of a thousand prompts must not stall the running streams.
INLINE_TURN = 4 * INLINE_TEXT
#: JSON around a conversation may take this much beyond the text itself.
_JSON_SLACK = 1 << 16


class Preparation:
    """The checks that every prompt passes, generating or not."""

    def __init__(
        self,
        facts: ServingFacts,
        tokenizer: Tokenizer,
        allow_template: bool,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._allow_template = allow_template
        self._clock = clock
        self._limit = tokenizer.byte_limit(facts.max_seq_len)
        self._inline_left = 0  # characters that may still be encoded on the spot in this turn
        self.seconds = metrics.histogram("hybserve_text_encode_seconds", LATENCY_BOUNDS)

    def begin_turn(self) -> None:
        self._inline_left = INLINE_TURN

    def encode_now(self, prompt: ChatPrompt | TextPrompt, add_special_tokens: bool) -> list[int] | None:
        """The ids of a short text; None = a job for the worker. Raises RequestError for what no worker need see."""
        if isinstance(prompt, ChatPrompt):
            if prompt.template is not None and not self._allow_template:
                raise unsupported_parameter(
                    "This server does not take chat templates from requests (text.allow_request_template).",
                    "chat_template",
                )
            self._check_size(len(prompt.messages_json), 2 * self._limit + _JSON_SLACK, "messages")
            return None
        if len(prompt.text) > min(INLINE_TEXT, self._inline_left):
            self._check_size(len(prompt.text), self._limit, "prompt")
            return None
        self._inline_left -= len(prompt.text)
        started = self._clock()
        ids = self._tokenizer.encode(prompt.text, add_special_tokens)
        self.seconds.observe(self._clock() - started)
        return ids

    def _check_size(self, size: int, limit: int, param: str) -> None:
        if size > limit:
            raise too_many_bytes(size, limit, self._facts.max_seq_len, param)

    def check_id(self, token: int, param: str) -> None:
        """Raises RequestError for an id that the model does not have."""
        if not 0 <= token < self._facts.vocab_size:
            raise invalid_value(
                f"{param} has the token id {token}; this model's ids run from 0 to {self._facts.vocab_size - 1}.", param
            )

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raises RequestError."""
        if ids and (min(ids) < 0 or max(ids) >= self._facts.vocab_size):
            for token in ids:
                self.check_id(token, param)

    def checked(self, ids: list[int], prompt: ChatPrompt | TextPrompt | TokenPrompt) -> list[int]:
        """The ids that the model will read for ``prompt``. Raises RequestError."""
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        if not ids:
            if self._facts.bos_id is None:
                raise invalid_value("The prompt is empty; this model needs at least one token to begin with.", param)
            return [self._facts.bos_id]
        self.check_ids(ids, param)
        return ids

    def max_tokens(self, prompt: int, requested: int) -> int:
        """``requested``, or with 0 all that the context has left. Raises RequestError when it does not fit."""
        limit = self._facts.max_seq_len
        if prompt + max(requested, 1) > limit:
            raise context_length_exceeded(limit, prompt, max(requested, 1))
        return requested or max(min(limit, self._facts.capacity_tokens) - prompt, 1)
