"""One generating request in the text role: what its tokens become on the way out.

A choice turns each token into one ``Delta``: text as far as it is settled, log-probabilities and ids if asked, and at
the end the finish reason. It ends at the first of: a stop string, a stop token, the length. Nothing leaves it after.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybserve.core.messages import Delta, Submit, TokenText
from hybserve.core.types import LOGPROB_FLOOR, Ended, FinishReason, TokenLogprobs
from hybserve.text.detokenize import Detokenizer, Stream
from hybserve.text.stop import StopMatcher, stop_strings


class Choice:
    """One of the n answers. ``tokens`` counts those that belong to it, the one that ended it included."""

    __slots__ = ("_detokenizer", "_matcher", "_opening", "_shown", "_stream", "_submit", "index", "open", "tokens")

    def __init__(self, index: int, submit: Submit, detokenizer: Detokenizer, stream: Stream) -> None:
        self.index = index
        self.open = True
        self.tokens = 0
        self._submit = submit
        self._detokenizer = detokenizer
        self._stream = stream
        self._matcher = StopMatcher(stop_strings(submit.stop), submit.include_stop) if submit.stop else None
        self._opening: Opening | None = None
        self._shown = 0  # characters of the choice's text before the next token, stop strings not yet cut

    def begin_with(self, opening: "Opening") -> None:
        """Let the first delta carry the echoed prompt."""
        self._opening = opening
        self._shown = len(opening.text)

    @property
    def stopped_by_string(self) -> bool:
        return self._matcher is not None and self._matcher.hit

    def advance(self, token: int, ended: int, entry: TokenLogprobs | None) -> Delta:
        """The delta of the next token. ``ended`` is a types.Ended value. Only while the choice is open."""
        submit = self._submit
        self.tokens += 1
        at = self._shown
        text = self._stream.feed(token) if ended != Ended.STOP else self._last_text(token)
        if ended:
            text += self._stream.flush()
        self._shown += len(text)
        if self._matcher is not None:
            text = self._pass_stops(self._matcher, text, ended)
        finish = self._finish(ended)
        details = [self._detail(token, entry, at)] if submit.sampling.logprobs >= 0 and entry is not None else None
        if self._opening is not None:
            text, details = self._opening.text + text, self._opening.joined(details)
            self._opening = None
        ids = [token] if submit.return_token_ids else None
        return Delta(submit.uid, self.index, text, 1, ids, details, finish)

    def _last_text(self, token: int) -> str:
        """The text of a stop token: none, unless the client stopped at it and wants to see it."""
        if not self._submit.include_stop or token not in self._submit.sampling.stop_ids:
            return ""
        if self._detokenizer.is_special(token):
            return self._stream.flush() + self._detokenizer.token_bytes(token).decode("utf-8", "replace")
        return self._stream.feed(token)

    def _pass_stops(self, matcher: StopMatcher, text: str, ended: int) -> str:
        """Before ``min_tokens`` exist nothing can stop the choice, so their text takes no part in the matching."""
        if self.tokens >= self._submit.sampling.min_tokens:
            text = matcher.push(text)
        if ended and not matcher.hit:
            text += matcher.flush()
        return text

    def _finish(self, ended: int) -> str | None:
        if not ended and not self.stopped_by_string:
            return None
        self.open = False
        by_length = ended == Ended.LENGTH and not self.stopped_by_string
        return FinishReason.LENGTH.value if by_length else FinishReason.STOP.value

    def _detail(self, token: int, entry: TokenLogprobs, at: int) -> TokenText:
        return token_text(self._detokenizer, token, entry, at)


@dataclass(frozen=True)
class Opening:
    """The echoed prompt: its text, and its tokens' details when log-probabilities were asked."""

    text: str
    details: list[TokenText] | None

    def joined(self, more: list[TokenText] | None) -> list[TokenText] | None:
        return more if self.details is None else self.details + (more or [])


@dataclass
class Request:
    """A request from its encoding to its terminal event. ``submit.sampling.stop_ids`` are the client's own."""

    api: int
    submit: Submit
    arrival: float  # seconds, time.monotonic()
    prompt: list[int] = field(default_factory=list)
    hidden: int = 0  # leading prompt tokens that the tokenizer added itself and echo does not show
    running: bool = False  # handed to the scheduler
    choices: list[Choice] = field(default_factory=list)
    prompt_entries: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in the prompt
    _pieces: list[str] = field(default_factory=list)
    unopened: bool = False  # the echo has not been given out yet

    def start(self, detokenizer: Detokenizer, prompt: list[int], hidden: int) -> None:
        """Fix the prompt and make the choices."""
        self.prompt, self.hidden, self.running = prompt, hidden, True
        self.unopened = self.submit.echo
        if self.submit.echo:
            self._pieces, stream = detokenizer.echo(prompt[hidden:])
        else:
            stream = detokenizer.stream(prompt)
        self.choices = [Choice(i, self.submit, detokenizer, stream.fork()) for i in range(self.submit.n)]

    def open_with_echo(self, detokenizer: Detokenizer) -> None:
        """Give every choice the prompt to begin with; at the first token, when its log-probabilities are here."""
        self.unopened = False
        details = self._prompt_details(detokenizer) if self.submit.sampling.prompt_logprobs >= 0 else None
        opening = Opening("".join(self._pieces), details)
        for choice in self.choices:
            choice.begin_with(opening)
        self._pieces, self.prompt_entries = [], {}

    def _prompt_details(self, detokenizer: Detokenizer) -> list[TokenText]:
        details, at = [], 0
        pieces = [""] * self.hidden + self._pieces
        for position, (token, piece) in enumerate(zip(self.prompt, pieces, strict=True)):
            details.append(token_text(detokenizer, token, self.prompt_entries.get(position), at))
            at += len(piece)
        return details

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    @property
    def open(self) -> bool:
        return any(choice.open for choice in self.choices)


def token_text(detokenizer: Detokenizer, token: int, entry: TokenLogprobs | None, at: int) -> TokenText:
    """A token with what is known about it; ``at`` = characters before it. No entry = no log-probability (the first)."""
    data = detokenizer.token_bytes(token)
    if entry is None:
        return TokenText(token, data.decode("utf-8", "replace"), data, None, (), at)
    top = _top(detokenizer, entry.top_ids, entry.top_logprobs)
    return TokenText(token, data.decode("utf-8", "replace"), data, _clamped(entry.logprob), top, at)


def _top(
    detokenizer: Detokenizer, ids: Sequence[int], logprobs: Sequence[float]
) -> tuple[tuple[str, bytes, float], ...]:
    pairs = ((detokenizer.token_bytes(token), value) for token, value in zip(ids, logprobs, strict=True))
    return tuple((data.decode("utf-8", "replace"), data, _clamped(value)) for data, value in pairs)


def _clamped(logprob: float) -> float:
    """JSON has no infinity and no NaN (which fails the comparison)."""
    return logprob if logprob >= LOGPROB_FLOOR else LOGPROB_FLOOR
