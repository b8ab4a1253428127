"""Every message that passes between roles. Roles import nothing from each other; this file is all they share.

    api ── ToText ──► text ── ToScheduler ──► scheduler ── ToRunner ──► runner (one per rank)
    api ◄── ToApi ── text ◄── FromScheduler ── scheduler ◄── FromRunner ── runner
    every role ── ToLaunch ──► launch (the parent), and FromLaunch back: Drain to api, Stop to every role

One frame (a msgpack list of these structs) per step per hop. Structs are array-like: a field is a position, so both
ends are always of one version (they are started by one parent). Hot messages are columns, not lists of structs: at
256 decoding rows a step costs a handful of list encodes.
"""

import builtins
from typing import TypeAlias

import msgspec

from hybserve.core.errors import ErrorBody
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import CacheTruth, Timing, TokenLogprobs


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all messages; ``tag`` is the class name."""


# api -> text


class ChatPrompt(Message):
    """A conversation, rendered by the chat template in the text role's worker process."""

    messages_json: bytes  # the validated, normalised messages as JSON
    template_kwargs_json: bytes = b"{}"
    template: str | None = None  # request override, only if text.allow_request_template
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TextPrompt(Message):
    text: str


class TokenPrompt(Message):
    ids: list[int]


class Submit(Message):
    """One prompt with n choices. ``sampling.stop_ids`` holds the client's stop ids only; text adds the model's EOS
    ids unless ``ignore_eos``. ``max_tokens`` 0 = fill the context. ``seed`` None = text draws one."""

    uid: int
    prompt: ChatPrompt | TextPrompt | TokenPrompt
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    echo: bool = False
    add_special_tokens: bool = True
    return_token_ids: bool = False
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    timeout: float = 0.0  # seconds from arrival, 0 = none


class Tokenize(Message):
    uid: int
    prompt: ChatPrompt | TextPrompt
    add_special_tokens: bool = True
    return_token_strs: bool = False


class Detokenize(Message):
    uid: int
    ids: list[int]


class Render(Message):
    """What a prompt becomes and which of it is cached; changes nothing."""

    uid: int
    prompt: ChatPrompt | TextPrompt | TokenPrompt
    add_special_tokens: bool = True
    tenant: str = ""
    cache_salt: str = ""


# api -> text -> scheduler


class Cancel(Message):
    """The client is gone; no terminal event is owed any more."""

    uid: int


class Drain(Message):
    """Take no new request; finish what runs. The seconds left are the sender's to count."""


# text -> scheduler


class Generate(Message):
    """An encoded request. ``sampling.max_tokens`` and ``sampling.stop_ids`` are final here.

    ``arrival`` is time.monotonic() at the text role, in seconds (one clock for all processes of a machine).
    """

    uid: int
    prompt: list[int]
    sampling: SamplingParams
    n: int
    tenant: str
    cache_salt: str
    priority: int
    arrival: float
    timeout: float
    #: Prompt positions worth a checkpoint, in tokens: start of the last user turn, end of the last message before the
    #: generation prompt.
    anchors: list[int] = []


class Probe(Message):
    """A read-only match of the prefix tree: no lease, no touch, no split."""

    uid: int
    prompt: list[int]
    tenant: str
    cache_salt: str


class Flush(Message):
    """Forget all that is cached. From an api it goes through text unchanged."""

    uid: int


class StopAt(Message):
    """A stop string ended this choice: its first ``index`` output tokens are the last that count."""

    uid: int
    choice: int
    index: int


# scheduler -> runner


class SequenceStart(Message):
    """Once per sequence and layout epoch, in the frame of the first plan that names ``seq``.

    ``history`` is prompt + generated tokens so far, sent only if ``sampling.needs_history``; ``generated`` counts how
    many of its last tokens are output (resumed sequences).
    """

    seq: int
    epoch: int
    choice: int
    sampling: SamplingParams
    history: list[int]
    prompt_len: int
    generated: int


class StepPlan(Message):
    """One step. Row r computes tokens [starts[r], starts[r] + counts[r]) of sequence seqs[r] in active slot slots[r].

    Order on the device: state copies and page copies, then the forward, then sampling. ``freed`` sequences are
    forgotten before anything else. ``start`` 0 begins from the zero state, whatever the slot holds.
    """

    step: int
    epoch: int
    seqs: list[int]
    starts: list[int]
    counts: list[int]
    slots: list[int]
    #: Token ids of all rows, concatenated; a single SAMPLED (-1) stands for the last token sampled for the sequence.
    tokens: list[int]
    #: Pages appended to block tables, as parallel columns (row index, page id), in block-table order.
    page_rows: list[int]
    page_ids: list[int]
    #: What to sample, as parallel columns: from the last position of row ``sample_rows[k]`` one token for sequence
    #: ``sample_seqs[k]`` as its output number ``sample_outputs[k]`` (0-based). A prefill row forks by several entries.
    sample_rows: list[int]
    sample_seqs: list[int]
    sample_outputs: list[int]
    #: Copies before the forward, as flat pairs source, target, source, target …
    state_copies: list[int]
    page_copies: list[int]
    #: Block tables of forked sequences: parallel columns (new seq, page id), before this step's page columns.
    fork_seqs: list[int]
    fork_pages: list[int]
    freed: list[int]
    #: Rows in the gap, as parallel columns (row index, kv_write_from): positions before kv_write_from read the pages
    #: that the tree owns and write nothing; only the state is computed again.
    gap_rows: list[int] = []
    gap_ends: list[int] = []
    #: Checkpoints to export, as parallel columns: the state of row ``export_rows[k]`` at page boundary
    #: ``export_positions[k]`` (start < position <= start + count) goes into slot ``export_slots[k]``.
    export_rows: list[int] = []
    export_positions: list[int] = []
    export_slots: list[int] = []


class Stop(Message):
    """Drop everything and leave the loop (a rank's orderly end)."""


# runner -> scheduler


class StepDone(Message):
    """Columns parallel to the plan's sample columns. A non-finite row carries a safe token and stands in ``bad``."""

    step: int
    epoch: int
    tokens: list[int]
    bad: list[int]  # indices into the sample columns
    logprobs: list[TokenLogprobs | None]  # empty when no row asked
    #: Prompt log-probabilities of this step: (row index, one entry per token of the row that has a successor in the
    #: prompt): entry j is about the token at position start + j + 1.
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]]
    forward_ms: float
    #: Acknowledgement by the kernel that wrote each exported slot, parallel to the plan's export columns: the position
    #: whose state it holds, and whether all of it is finite.
    export_positions: list[int] = []
    export_finite: list[bool] = []


class StepFailed(Message):
    """The forward of a step raised. ``culprits`` are sequences to blame (fail them, park and recompute the rest);
    empty = not attributable, the engine is lost."""

    step: int
    epoch: int
    culprits: list[int]
    reason: str


# scheduler -> text


class Accepted(Message):
    """The request is in the queue (all admission checks passed); text forwards it, headers may now be sent."""

    uid: int
    prompt_tokens: int = 0
    prompt_ids: list[int] | None = None  # only if return_token_ids or echo


class Tokens(Message):
    """The tokens of one step, as parallel columns. ``ended`` holds types.Ended values."""

    uids: list[int]
    choices: list[int]
    tokens: list[int]
    ended: list[int]
    logprobs: list[TokenLogprobs | None]  # empty when nobody asked


class PromptLogprobs(Message):
    """Consecutive prompt log-probabilities of a request; entry j is about prompt token ``first`` + j."""

    uid: int
    first: int
    entries: list[TokenLogprobs]


class Finished(Message):
    """All choices have ended and everything is freed. After the last Tokens of the request."""

    uid: int
    cache: CacheTruth
    timing: Timing


class Probed(Message):
    uid: int
    cache: CacheTruth


class Flushed(Message):
    """Nothing cached before matches any more. ``pages`` and ``states`` came free at once, what runs comes later."""

    uid: int
    pages: int
    states: int


class Failed(Message):
    """The one terminal event of a request that did not finish."""

    uid: int
    error: ErrorBody


# text -> api


class Delta(Message):
    """New text of one choice. ``finish_reason`` ("stop", "length") closes the choice. Offsets count characters of the
    choice's text (with ``echo``: of prompt + text)."""

    uid: int
    choice: int
    text: str
    tokens: int = 0  # generated tokens that this delta settles
    token_ids: list[int] | None = None
    #: One entry per token, parallel to ``token_strs``/``token_bytes``; None when not asked.
    logprobs: list["TokenText"] | None = None
    finish_reason: str | None = None


class TokenText(msgspec.Struct, frozen=True, array_like=True):
    """A token with its text and log-probability; ``top`` = the likeliest alternatives, best first."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None  # None for the first prompt token
    top: tuple[tuple[str, builtins.bytes, float], ...] = ()
    offset: int = 0


class Done(Message):
    """The one terminal event of a request that finished: all choices have been closed by a Delta before."""

    uid: int
    prompt_tokens: int
    completion_tokens: int
    cache: CacheTruth
    timing: Timing


class Tokenized(Message):
    uid: int
    ids: list[int]
    strs: list[str] | None = None


class Detokenized(Message):
    uid: int
    text: str


class Rendered(Message):
    uid: int
    text: str
    ids: list[int]
    cache: CacheTruth


# upstream, forwarded hop by hop to every api and to launch


class Loading(Message):
    """Progress of start: ``stage`` in words, ``done`` in [0, 1]."""

    stage: str
    done: float


class Ready(Message):
    """The role can serve (engine: weights loaded and warmed up). ``report`` lines go to the startup report."""

    role: str
    report: list[tuple[str, str]] = []
    stages: list[tuple[str, float]] = []  # start-up stages in seconds


class MetricsSnapshot(Message):
    """Values of one role since start. Names are metric names without labels or ``name{label="x"}``."""

    role: str
    gauges: dict[str, float]
    counters: dict[str, float]
    #: name -> (bucket upper bounds, cumulative counts incl. +Inf, sum)
    histograms: dict[str, tuple[list[float], list[int], float]]


class Heartbeat(Message):
    """Sent at least every second while the role's loop turns. ``progress`` counts steps or messages handled."""

    role: str
    progress: int
    busy: bool


class Fatal(Message):
    """The role cannot go on; ``exit_code`` is what the process should end with (errors.py)."""

    role: str
    reason: str
    exit_code: int = 1


ToText: TypeAlias = Submit | Tokenize | Detokenize | Render | Flush | Cancel | Drain
ToScheduler: TypeAlias = Generate | Cancel | StopAt | Probe | Flush | Drain
ToRunner: TypeAlias = SequenceStart | StepPlan | Stop
FromRunner: TypeAlias = StepDone | StepFailed | Loading | Ready | Fatal
FromScheduler: TypeAlias = (
    Accepted
    | Tokens
    | PromptLogprobs
    | Finished
    | Failed
    | Probed
    | Flushed
    | Loading
    | Ready
    | MetricsSnapshot
    | Heartbeat
    | Fatal
)
ToApi: TypeAlias = (
    Accepted
    | Delta
    | Done
    | Failed
    | Tokenized
    | Detokenized
    | Rendered
    | Flushed
    | Loading
    | Ready
    | MetricsSnapshot
    | Heartbeat
    | Fatal
)
ToLaunch: TypeAlias = Loading | Ready | Heartbeat | Fatal
FromLaunch: TypeAlias = Drain | Stop
