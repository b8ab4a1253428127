"""The text role without its sockets: messages in, messages in the outboxes out.

It owns the end of every request: each ``Submit`` gets exactly one of ``Done`` and ``Failed``, unless the client
cancelled; each choice is closed by one ``Delta`` with a finish reason before ``Done``.

    Submit ─► [worker: template, long encode] ─► checks ─► Generate ─► Accepted, Delta … ─► Done
                 └──────────────────── refused at any point ──────────────────────────────► Failed
"""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from hybserve.core.errors import (
    ErrorBody,
    RequestError,
    deadline_exceeded,
    engine_error,
    unavailable,
)
from hybserve.core.messages import (
    Accepted,
    Cancel,
    ChatPrompt,
    Detokenize,
    Done,
    Drain,
    Failed,
    Fatal,
    Finished,
    Flush,
    Flushed,
    FromScheduler,
    Generate,
    Heartbeat,
    Loading,
    MetricsSnapshot,
    Probed,
    PromptLogprobs,
    Ready,
    Render,
    StopAt,
    Submit,
    TextPrompt,
    ToApi,
    Tokenize,
    Tokens,
    ToScheduler,
    ToText,
)
from hybserve.core.types import Ended, ServingFacts
from hybserve.observe.metrics import Metrics
from hybserve.text.detokenize import Detokenizer
from hybserve.text.jobs import Decoded, Encode, Encoded, Job, Outcome, Refused
from hybserve.text.lookups import Lookups
from hybserve.text.prepare import Preparation
from hybserve.text.request import Request
from hybserve.text.tokenize import Tokenizer


class TextCore:
    """See the module. ``draw_seed`` gives seeds below 2**63; ``clock`` is time.monotonic."""

    def __init__(
        self,
        facts: ServingFacts,
        tokenizer: Tokenizer,
        allow_template: bool,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._draw_seed = draw_seed
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._draining = False
        self._engine_gone = False
        self.apis: set[int] = set()
        self.metrics = Metrics("text")
        self._preparation = Preparation(facts, tokenizer, allow_template, self.metrics, clock)
        #: Outboxes; the owner empties them after each turn.
        self.to_apis: dict[int, list[ToApi]] = {}
        self.to_engine: list[ToScheduler] = []
        self.jobs: list[Job] = []
        self.withdrawn: list[int] = []  # jobs that nobody waits for any more
        self._lookups = Lookups(
            self._preparation,
            self._detokenizer,
            clock,
            self._send,
            self._tell_engine,
            lambda job: self.jobs.append(job),
        )

    @property
    def active(self) -> int:
        """Requests without their terminal event."""
        return len(self._requests)

    @property
    def idle(self) -> bool:
        return not self._requests and not self._lookups

    # api -> text

    def from_api(self, api: int, messages: Iterable[ToText]) -> None:
        self._preparation.begin_turn()
        for message in messages:
            match message:
                case Submit():
                    self._submit(api, message)
                case Cancel(uid=uid):
                    self._cancel(uid)
                case Tokenize() | Detokenize():
                    self._lookups.ask(api, message)
                case Render() | Flush():
                    self._ask_engine(api, message)
                case Drain():
                    self.drain(message)

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self, message: Drain) -> None:
        self._draining = True
        self.to_engine.append(message)

    def api_lost(self, api: int) -> None:
        """Cancel all that came from there."""
        self.apis.discard(api)
        self.to_apis.pop(api, None)
        mine = [uid for uid, request in self._requests.items() if request.api == api]
        mine += self._lookups.of(api)
        for uid in mine:
            self._cancel(uid)

    def _submit(self, api: int, submit: Submit) -> None:
        request = Request(api, submit, self._clock())
        self._requests[submit.uid] = request
        self.metrics.count("hybserve_text_requests_total")
        try:
            self._check_submit(submit)
            self._prepare(request)
        except RequestError as error:
            self._fail(submit.uid, error.body)

    def _check_submit(self, submit: Submit) -> None:
        self._check_engine()
        for token in submit.sampling.stop_ids:
            self._preparation.check_id(token, "stop_token_ids")
        for token, _ in submit.sampling.logit_bias:
            self._preparation.check_id(token, "logit_bias")

    def _check_engine(self) -> None:
        """Raises RequestError when nothing new may go there."""
        if self._engine_gone:
            raise unavailable("engine_unhealthy", "The engine has stopped.")
        if self._draining:
            raise unavailable("draining", "The server is shutting down and takes no new requests.")

    def _prepare(self, request: Request) -> None:
        """Encode on the spot what is short; hand the rest to the worker. Raises RequestError."""
        prompt = request.submit.prompt
        if isinstance(prompt, ChatPrompt | TextPrompt):
            ids = self._preparation.encode_now(prompt, request.submit.add_special_tokens)
            if ids is None:
                specials, chat = request.submit.add_special_tokens, isinstance(prompt, ChatPrompt)
                self.jobs.append(Encode(request.submit.uid, prompt, specials, anchors=chat))
                return
        else:
            ids = prompt.ids
        self._generate(request, ids, [])

    def _generate(self, request: Request, ids: list[int], anchors: list[int]) -> None:
        """Check the encoded prompt and hand it to the scheduler. Raises RequestError."""
        submit = request.submit
        prompt, hidden = self._preparation.checked(ids, submit.prompt), self._hidden(submit, ids)
        sampling = msgspec.structs.replace(
            submit.sampling,
            max_tokens=self._preparation.max_tokens(len(prompt), submit.sampling.max_tokens),
            seed=submit.seed if submit.seed is not None else self._draw_seed(),
            stop_ids=self._stop_ids(submit),
        )
        request.start(self._detokenizer, prompt, hidden)
        self.to_engine.append(
            Generate(
                submit.uid,
                prompt,
                sampling,
                submit.n,
                submit.tenant,
                submit.cache_salt,
                submit.priority,
                request.arrival,
                submit.timeout,
                anchors,
            )
        )

    def _hidden(self, submit: Submit, ids: list[int]) -> int:
        """How many leading tokens of the prompt the client did not write: the BOS that the tokenizer or we put."""
        bos = self._facts.bos_id
        if not ids:
            return 1
        if not isinstance(submit.prompt, TextPrompt) or bos is None or ids[0] != bos:
            return 0
        return 0 if submit.prompt.text.startswith(self._detokenizer.token_string(bos)) else 1

    def _stop_ids(self, submit: Submit) -> tuple[int, ...]:
        if submit.ignore_eos:
            return submit.sampling.stop_ids
        return tuple(dict.fromkeys(submit.sampling.stop_ids + self._facts.eos_ids))

    def _cancel(self, uid: int) -> None:
        request = self._requests.pop(uid, None)
        if request is not None and request.running:
            self.to_engine.append(Cancel(uid))
        elif request is not None or self._lookups.drop(uid):
            self.withdrawn.append(uid)

    def _ask_engine(self, api: int, question: Render | Flush) -> None:
        """Questions that the engine takes part in."""
        try:
            self._check_engine()
        except RequestError as error:
            self._send(api, Failed(question.uid, error.body))
        else:
            self._lookups.ask(api, question)

    # worker -> text

    def from_worker(self, outcome: Outcome) -> None:
        if outcome.job in self._lookups:
            self._lookups.from_worker(outcome)
            return
        request = self._requests.get(outcome.job)
        if request is None or request.running:
            return  # cancelled, or timed out, while the worker was busy with it
        self._preparation.seconds.observe(self._clock() - request.arrival)
        match outcome:
            case Encoded(ids=ids, anchors=anchors):
                try:
                    self._check_submit(request.submit)
                    self._generate(request, ids, anchors)
                except RequestError as error:
                    self._fail(outcome.job, error.body)
            case Refused(error=error):
                self._fail(outcome.job, error)
            case Decoded():
                raise AssertionError("the worker decoded where it was asked to encode")

    def tick(self) -> None:
        """Once a second: end requests whose time ran out before they reached the scheduler."""
        now = self._clock()
        late = [
            uid
            for uid, request in self._requests.items()
            if not request.running and 0 < request.submit.timeout < now - request.arrival
        ]
        for uid in late:
            self.withdrawn.append(uid)
            self._fail(uid, deadline_exceeded("The request's time ran out before it could start.").body)

    # scheduler -> text

    def from_engine(self, messages: Iterable[FromScheduler]) -> None:
        for message in messages:
            match message:
                case Tokens():
                    self._tokens(message)
                case Accepted(uid=uid):
                    self._accepted(uid)
                case PromptLogprobs():
                    self._prompt_logprobs(message)
                case Finished():
                    self._finished(message)
                case Failed(uid=uid, error=error):
                    self._fail(uid, error)
                case Probed() | Flushed():
                    self._lookups.from_engine(message)
                case Loading() | Ready() | MetricsSnapshot() | Heartbeat() | Fatal():
                    self.broadcast([message])

    def _tokens(self, message: Tokens) -> None:
        requests, to_apis = self._requests, self.to_apis
        entries = message.logprobs
        columns = zip(message.uids, message.choices, message.tokens, message.ended, strict=True)
        for row, (uid, index, token, ended) in enumerate(columns):
            request = requests.get(uid)
            if request is None:
                continue  # cancelled; the scheduler has not heard of it yet
            choice = request.choices[index]
            if not choice.open:
                continue  # past its stop string; the scheduler ran ahead
            if request.unopened:
                request.open_with_echo(self._detokenizer)
            delta = choice.advance(token, ended, entries[row] if entries else None)
            if choice.stopped_by_string and ended == Ended.NO:
                self.to_engine.append(StopAt(uid, index, choice.tokens))
            to_apis.setdefault(request.api, []).append(delta)
        self.metrics.count("hybserve_text_tokens_total", len(message.uids))

    def _accepted(self, uid: int) -> None:
        request = self._requests.get(uid)
        if request is None:
            return
        wanted = request.submit.return_token_ids or request.submit.echo
        ids = request.prompt if wanted else None
        self._send(request.api, Accepted(uid, len(request.prompt), ids))

    def _prompt_logprobs(self, message: PromptLogprobs) -> None:
        request = self._requests.get(message.uid)
        if request is not None and request.unopened:
            request.prompt_entries.update(enumerate(message.entries, message.first))

    def _finished(self, message: Finished) -> None:
        request = self._requests.get(message.uid)
        if request is None:
            return
        if request.open:
            self._fail(message.uid, engine_error("The engine ended this request before its answer was complete.").body)
            return
        del self._requests[message.uid]
        done = Done(message.uid, len(request.prompt), request.completion_tokens, message.cache, message.timing)
        self.metrics.count("hybserve_text_done_total")
        self._send(request.api, done)

    def engine_lost(self, reason: str) -> None:
        """The engine is gone: end every request with one error and refuse new ones."""
        self._engine_gone = True
        error = engine_error(reason).body
        for uid in list(self._requests):
            self._fail(uid, error)
        self._lookups.engine_lost(error)

    def end_all(self, error: ErrorBody) -> None:
        """One terminal event for everything that is open."""
        for uid in list(self._requests):
            self._fail(uid, error)
        self._lookups.fail_all(error)

    # text -> api

    def _fail(self, uid: int, error: ErrorBody) -> None:
        request = self._requests.pop(uid, None)
        if request is not None:
            self.metrics.count("hybserve_text_failed_total")
            self._send(request.api, Failed(uid, error))

    def _tell_engine(self, message: ToScheduler) -> None:
        self.to_engine.append(message)

    def _send(self, api: int, message: ToApi) -> None:
        self.to_apis.setdefault(api, []).append(message)

    def broadcast(self, messages: Sequence[Loading | Ready | MetricsSnapshot | Heartbeat | Fatal]) -> None:
        """What concerns every api."""
        for api in self.apis:
            self.to_apis.setdefault(api, []).extend(messages)

    def describe(self) -> str:
        """One line for the startup report."""
        templates = ", ".join(self._tokenizer.chat_templates) or "none"
        return f"{self._detokenizer.kind}, {len(self._tokenizer.vocab)} tokens; chat templates: {templates}"

    def snapshot(self, worker_queue: int, worker_restarts: int) -> MetricsSnapshot:
        self.metrics.gauge("hybserve_text_requests_active", len(self._requests))
        self.metrics.gauge("hybserve_text_worker_queue", worker_queue)
        self.metrics.gauge("hybserve_text_worker_restarts", worker_restarts)
        return self.metrics.snapshot()
