"""Questions that generate nothing: tokenize, detokenize, render, flush. Each gets one answer or one ``Failed``.

Tokenize ─► [worker] ─► Tokenized              Render ─► [worker] ─► Probe ─► Probed ─► Rendered
Detokenize ─► [worker] ─► Detokenized          Flush ─► Flush ─► Flushed
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from hybserve.core.errors import ErrorBody, RequestError
from hybserve.core.messages import (
    Detokenize,
    Detokenized,
    Failed,
    Flush,
    Flushed,
    Probe,
    Probed,
    Render,
    Rendered,
    ToApi,
    Tokenize,
    Tokenized,
    TokenPrompt,
    ToScheduler,
)
from hybserve.text.detokenize import Detokenizer
from hybserve.text.jobs import Decode, Decoded, Encode, Encoded, Job, Outcome, Refused
from hybserve.text.prepare import Preparation

Question: TypeAlias = Tokenize | Detokenize | Render | Flush

#: As many ids are decoded on the spot.
INLINE_IDS = 8192


@dataclass
class _Lookup:
    """One open question. ``ids`` and ``text`` are a rendered prompt; ``asked``: it is the engine's turn."""

    api: int
    question: Question
    at: float
    asked: bool = False
    ids: list[int] = field(default_factory=list)
    text: str = ""


class Lookups:
    """The open questions. Outboxes are the core's, reached through the three functions."""

    def __init__(
        self,
        preparation: Preparation,
        detokenizer: Detokenizer,
        clock: Callable[[], float],
        to_api: Callable[[int, ToApi], None],
        to_engine: Callable[[ToScheduler], None],
        to_worker: Callable[[Job], None],
    ) -> None:
        self._preparation = preparation
        self._detokenizer = detokenizer
        self._clock = clock
        self._to_api = to_api
        self._to_engine = to_engine
        self._to_worker = to_worker
        self._open: dict[int, _Lookup] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, uid: int) -> bool:
        return uid in self._open

    def of(self, api: int) -> list[int]:
        """Uids of what came from there."""
        return [uid for uid, lookup in self._open.items() if lookup.api == api]

    def drop(self, uid: int) -> bool:
        """Forget a question; whether the worker may still have it."""
        lookup = self._open.pop(uid, None)
        return lookup is not None and not lookup.asked

    def fail(self, uid: int, error: ErrorBody) -> None:
        lookup = self._open.pop(uid)
        self._to_api(lookup.api, Failed(uid, error))

    def fail_all(self, error: ErrorBody) -> None:
        for uid in list(self._open):
            self.fail(uid, error)

    def engine_lost(self, error: ErrorBody) -> None:
        """End what waits for the engine, or will."""
        for uid, lookup in list(self._open.items()):
            if isinstance(lookup.question, Render | Flush):
                self.fail(uid, error)

    def ask(self, api: int, question: Question) -> None:
        uid = question.uid
        lookup = self._open[uid] = _Lookup(api, question, self._clock())
        try:
            match question:
                case Tokenize():
                    self._tokenize(question)
                case Detokenize():
                    self._preparation.check_ids(question.ids, "tokens")
                    self._decode(uid, question.ids)
                case Render():
                    self._render(question)
                case Flush():
                    lookup.asked = True
                    self._to_engine(question)
        except RequestError as error:
            self.fail(uid, error.body)

    def _tokenize(self, question: Tokenize) -> None:
        ids = self._preparation.encode_now(question.prompt, question.add_special_tokens)
        if ids is None:
            self._to_worker(Encode(question.uid, question.prompt, question.add_special_tokens))
        else:
            self._answer(Encoded(question.uid, ids))

    def _render(self, question: Render) -> None:
        prompt = question.prompt
        if isinstance(prompt, TokenPrompt):
            self._open[question.uid].ids = self._checked(question, prompt.ids)
            self._decode(question.uid, prompt.ids)
            return
        ids = self._preparation.encode_now(prompt, question.add_special_tokens)
        if ids is None:
            self._to_worker(Encode(question.uid, prompt, question.add_special_tokens, return_text=True))
        else:
            self._answer(Encoded(question.uid, ids, text=getattr(prompt, "text", "")))

    def _decode(self, uid: int, ids: list[int]) -> None:
        if len(ids) > INLINE_IDS:
            self._to_worker(Decode(uid, ids))
        else:
            self._answer(Decoded(uid, self._detokenizer.decode(ids, skip_special=False)))

    def from_worker(self, outcome: Outcome) -> None:
        """The outcome of a job of an open question."""
        self._preparation.seconds.observe(self._clock() - self._open[outcome.job].at)
        try:
            self._answer(outcome)
        except RequestError as error:
            self.fail(outcome.job, error.body)

    def _answer(self, outcome: Outcome) -> None:
        """Answer, or take the next step to the answer. Raises RequestError."""
        uid, lookup = outcome.job, self._open[outcome.job]
        match lookup.question, outcome:
            case _, Refused(error=error):
                self.fail(uid, error)
            case Render() as question, Encoded(ids=ids, text=text):
                lookup.ids = self._checked(question, ids)
                self._probe(lookup, question, text)
            case Render() as question, Decoded(text=text):
                self._probe(lookup, question, text)
            case Tokenize() as question, Encoded(ids=ids):
                wanted = question.return_token_strs
                strings = [self._detokenizer.token_string(token) for token in ids] if wanted else None
                self._close(uid, Tokenized(uid, ids, strings))
            case Detokenize(), Decoded(text=text):
                self._close(uid, Detokenized(uid, text))
            case _:
                raise AssertionError("an outcome that does not belong to the question")

    def _checked(self, question: Render, ids: list[int]) -> list[int]:
        """What the model would read, refused as a request for one token would be. Raises RequestError."""
        prompt = self._preparation.checked(ids, question.prompt)
        self._preparation.max_tokens(len(prompt), 1)
        return prompt

    def _probe(self, lookup: _Lookup, question: Render, text: str) -> None:
        lookup.text, lookup.asked = text, True
        self._to_engine(Probe(question.uid, lookup.ids, question.tenant, question.cache_salt))

    def from_engine(self, message: Probed | Flushed) -> None:
        lookup = self._open.get(message.uid)
        if lookup is None:
            return  # cancelled
        if isinstance(message, Flushed):
            self._close(message.uid, message)
        else:
            self._close(message.uid, Rendered(message.uid, lookup.text, lookup.ids, message.cache))

    def _close(self, uid: int, answer: Tokenized | Detokenized | Rendered | Flushed) -> None:
        self._to_api(self._open.pop(uid).api, answer)
