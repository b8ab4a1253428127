"""Bodies of the routes as typed, validated orders. Everything that leaves this module is in range.

Temperatures below ``GREEDY_BELOW`` mean greedy decoding, and a ``top_k`` beyond the vocabulary means off.
"""

import re
from typing import Any

import msgspec

from hybserve.api.conversation import normalise_messages
from hybserve.api.fields import Fields, shown
from hybserve.api.unsupported import refuse_unsupported
from hybserve.core.errors import (
    RequestError,
    context_length_exceeded,
    invalid_value,
    model_not_found,
    unsupported_parameter,
)
from hybserve.core.messages import ChatPrompt, Submit, TextPrompt, TokenPrompt
from hybserve.core.sampling import SamplingParams
from hybserve.core.types import ServingFacts

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
GREEDY_BELOW = 1e-4
MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_STOP_IDS, MAX_BIASES, MAX_SALT_BYTES = 128, 1024, 128
MAX_CHOICES, MAX_PROMPTS = 128, 2048
#: Upper bound of prompts x n x tokens of one HTTP request.
MAX_TOKENS_ORDERED = 1 << 26
#: No tokenizer in use packs more characters into one token; longer prompts cannot fit whatever the tokenizer says.
MAX_CHARS_PER_TOKEN = 512
COMPLETION_MAX_TOKENS = 16
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_TOKEN_ID = re.compile(r"(?:0|[1-9][0-9]{0,18})\Z")
_REQUEST_ID = re.compile(r"[!-~]{1,128}\Z")
#: Names that the text role gives to the template itself; a request must not replace them.
_RESERVED_KWARGS = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
    "bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now",
})  # fmt: skip

Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request of a client: prompts x n choices, and how to answer."""

    chat: bool
    model: str
    prompts: list[Prompt]
    sampling: SamplingParams
    n: int
    seed: int | None
    ignore_eos: bool
    stop: tuple[str, ...]
    include_stop: bool
    echo: bool
    add_special_tokens: bool
    return_token_ids: bool
    cache_salt: str
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    request_id: str | None
    ignored: tuple[str, ...]
    warnings: tuple[str, ...]

    def submits(self, uids: list[int], tenant: str, timeout: float) -> list[Submit]:
        return [
            Submit(
                uid=uid,
                prompt=prompt,
                sampling=self.sampling,
                n=self.n,
                seed=self.seed,
                ignore_eos=self.ignore_eos,
                stop=self.stop,
                include_stop=self.include_stop,
                echo=self.echo,
                add_special_tokens=self.add_special_tokens,
                return_token_ids=self.return_token_ids,
                tenant=tenant,
                cache_salt=self.cache_salt,
                priority=self.priority,
                timeout=timeout,
            )
            for uid, prompt in zip(uids, self.prompts, strict=True)
        ]


class Schema:
    """Parses bodies against the facts of the served model."""

    def __init__(self, facts: ServingFacts, *, allow_request_template: bool = False) -> None:
        self._facts = facts
        self._allow_request_template = allow_request_template

    # routes

    def chat(self, body: dict[str, Any]) -> Order:
        fields = Fields(body)
        model = self.model(fields)
        prompt, ignored, warnings = self._chat_prompt(fields)
        logprobs = self._chat_logprobs(fields)
        newer = "max_completion_tokens" if fields.given("max_completion_tokens") else "max_tokens"
        fields.get("max_tokens")
        max_tokens = fields.integer(newer, 1, INT64_MAX, 0)
        return self._order(
            fields,
            chat=True,
            model=model,
            prompts=[prompt],
            max_tokens=max_tokens,
            logprobs=logprobs,
            add_special_tokens=fields.boolean("add_special_tokens", False),
            ignored=ignored,
            warnings=warnings,
        )

    def completion(self, body: dict[str, Any]) -> Order:
        fields = Fields(body)
        model = self.model(fields)
        prompts = self._prompts(fields)
        echo = fields.boolean("echo", False)
        return self._order(
            fields,
            chat=False,
            model=model,
            prompts=prompts,
            max_tokens=fields.integer("max_tokens", 1, INT64_MAX, COMPLETION_MAX_TOKENS),
            logprobs=fields.integer("logprobs", 0, 20, -1),
            echo=echo,
            add_special_tokens=fields.boolean("add_special_tokens", True),
        )

    def tokenize(self, body: dict[str, Any]) -> tuple[ChatPrompt | TextPrompt, bool, bool]:
        """(prompt, add_special_tokens, return_token_strs) of ``POST /tokenize``."""
        fields = Fields(body)
        self.model(fields)
        strs = fields.boolean("return_token_strs", False)
        if fields.given("messages"):
            if fields.given("prompt"):
                raise invalid_value("prompt and messages exclude each other.", "prompt")
            chat, _, _ = self._chat_prompt(fields)
            return chat, fields.boolean("add_special_tokens", False), strs
        text = fields.string("prompt")
        if text is None:
            raise invalid_value("prompt (a string) or messages is required.", "prompt")
        return TextPrompt(text), fields.boolean("add_special_tokens", True), strs

    def detokenize(self, body: dict[str, Any]) -> list[int]:
        fields = Fields(body)
        self.model(fields)
        tokens = fields.array("tokens", 1 << 24)
        if tokens is None:
            raise invalid_value("tokens (a list of token ids) is required.", "tokens")
        self._check_ids(tokens, "tokens")
        return tokens

    def model(self, fields: Fields) -> str:
        """The served name that the request means; absent = the first."""
        value = fields.get("model")
        names = self._facts.served_names
        if value is None:
            return names[0]
        if not isinstance(value, str):
            raise fields.refuse("model", "a string", value)
        if value not in names:
            raise model_not_found(value if len(value) <= 64 else value[:61] + "...", list(names))
        return value

    # prompts

    def _prompts(self, fields: Fields) -> list[Prompt]:
        value = fields.get("prompt")
        if value is None:
            raise invalid_value("prompt is required.", "prompt")
        if isinstance(value, str):
            return [self._text(value, "prompt")]
        if not isinstance(value, list):
            raise fields.refuse("prompt", "a string, a list of strings, token ids, or a list of token-id lists", value)
        if not value:
            raise invalid_value("prompt must not be empty.", "prompt")
        if type(value[0]) is int:
            return [self._tokens(value, "prompt")]
        if len(value) > MAX_PROMPTS:
            raise invalid_value(f"prompt must have at most {MAX_PROMPTS} entries, got {len(value)}.", "prompt")
        return [self._prompt_entry(entry, f"prompt[{index}]") for index, entry in enumerate(value)]

    def _prompt_entry(self, entry: Any, param: str) -> Prompt:
        if isinstance(entry, str):
            return self._text(entry, param)
        if isinstance(entry, list):
            return self._tokens(entry, param)
        raise invalid_value(f"{param} must be a string or a list of token ids, got {shown(entry)}.", param)

    def _text(self, text: str, param: str) -> TextPrompt:
        if not text and self._facts.bos_id is None:
            raise invalid_value(f"{param} must not be empty.", param)
        self._check_size(len(text), param)
        return TextPrompt(text)

    def _check_size(self, chars: int, param: str) -> None:
        limit = self._facts.max_seq_len
        if chars > limit * MAX_CHARS_PER_TOKEN:
            message = (
                f"{param} has {chars} characters, which cannot fit this model's maximum context length of "
                f"{limit} tokens."
            )
            error = context_length_exceeded(limit, 0, 0).body
            raise RequestError(msgspec.structs.replace(error, message=message, param=param))

    def _tokens(self, ids: list[Any], param: str) -> TokenPrompt:
        if not ids:
            raise invalid_value(f"{param} must not be empty.", param)
        if len(ids) >= self._facts.max_seq_len:
            raise context_length_exceeded(self._facts.max_seq_len, len(ids), 1)
        self._check_ids(ids, param)
        return TokenPrompt(ids)

    def _check_ids(self, ids: list[Any], param: str) -> None:
        vocab = self._facts.vocab_size
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab):
            return
        index = next(i for i, token in enumerate(ids) if type(token) is not int or not 0 <= token < vocab)
        at = f"{param}[{index}]"
        raise invalid_value(f"{at} must be a token id from 0 to {vocab - 1}, got {shown(ids[index])}.", at)

    def _chat_prompt(self, fields: Fields) -> tuple[ChatPrompt, list[str], list[str]]:
        messages, ignored = normalise_messages(fields)
        kwargs, warnings = self._template_kwargs(fields)
        resume = fields.boolean("continue_final_message", False)
        generate = fields.boolean("add_generation_prompt", not resume)
        if resume and generate:
            raise invalid_value(
                "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
            )
        if resume and messages[-1]["role"] != "assistant":
            raise invalid_value(
                "continue_final_message needs an assistant message at the end.", "continue_final_message"
            )
        encoded = msgspec.json.encode(messages)
        self._check_size(len(encoded) // 8, "messages")
        prompt = ChatPrompt(
            messages_json=encoded,
            template_kwargs_json=msgspec.json.encode(kwargs),
            template=self._template(fields),
            add_generation_prompt=generate,
            continue_final_message=resume,
        )
        return prompt, ignored, warnings

    def _template(self, fields: Fields) -> str | None:
        template = fields.string("chat_template", max_bytes=1 << 18)
        if template is not None and not self._allow_request_template:
            raise unsupported_parameter(
                "chat_template in a request is not allowed here (text.allow_request_template is false).",
                "chat_template",
            )
        return template

    def _template_kwargs(self, fields: Fields) -> tuple[dict[str, Any], list[str]]:
        kwargs = dict(fields.object("chat_template_kwargs") or {})
        for key in kwargs:
            if key in _RESERVED_KWARGS or not key.isidentifier():
                param = f"chat_template_kwargs.{key[:64]}"
                raise invalid_value(f"{param} cannot be set by a request.", param)
        effort = fields.string("reasoning_effort")
        if effort is None:
            return kwargs, []
        if effort not in EFFORTS:
            raise fields.refuse("reasoning_effort", f"one of {', '.join(EFFORTS)}", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
            return kwargs, []
        return kwargs, [f"reasoning_effort {effort} has no effect on this model"]

    # common fields

    def _chat_logprobs(self, fields: Fields) -> int:
        wanted = fields.boolean("logprobs", False)
        top = fields.integer("top_logprobs", 0, 20, 0)
        if top and not wanted:
            raise invalid_value("top_logprobs needs logprobs: true.", "top_logprobs")
        return top if wanted else -1

    def _order(
        self,
        fields: Fields,
        *,
        chat: bool,
        model: str,
        prompts: list[Prompt],
        max_tokens: int,
        logprobs: int,
        add_special_tokens: bool,
        echo: bool = False,
        ignored: list[str] | None = None,
        warnings: list[str] | None = None,
    ) -> Order:
        n = fields.integer("n", 1, MAX_CHOICES, 1)
        self._bound(n, len(prompts), max_tokens)
        refuse_unsupported(fields, chat=chat, n=n)
        stream = fields.boolean("stream", False)
        include_usage, continuous_usage = self._stream_options(fields, stream)
        order = Order(
            chat=chat,
            model=model,
            prompts=prompts,
            sampling=self._sampling(fields, max_tokens, logprobs, echo),
            n=n,
            seed=self._seed(fields),
            ignore_eos=fields.boolean("ignore_eos", False),
            stop=self._stop(fields),
            include_stop=fields.boolean("include_stop_str_in_output", False),
            echo=echo,
            add_special_tokens=add_special_tokens,
            return_token_ids=fields.boolean("return_token_ids", False),
            cache_salt=self._cache_salt(fields),
            priority=fields.integer("priority", -(1 << 31), (1 << 31) - 1, 0),
            stream=stream,
            include_usage=include_usage,
            continuous_usage=continuous_usage,
            request_id=self._request_id(fields),
            ignored=(),
            warnings=tuple(warnings or ()),
        )
        return msgspec.structs.replace(order, ignored=(*fields.unread(), *(ignored or ())))

    def _bound(self, n: int, prompts: int, max_tokens: int) -> None:
        each = min(max_tokens or self._facts.max_seq_len, self._facts.max_seq_len)
        if prompts * n > 1 and prompts * n * each > MAX_TOKENS_ORDERED:
            raise invalid_value(
                f"{prompts} prompts x {n} choices x {each} tokens is more than the {MAX_TOKENS_ORDERED} tokens that "
                "one request may ask for.",
                "n" if n > 1 else "prompt",
            )

    def _sampling(self, fields: Fields, max_tokens: int, logprobs: int, echo: bool) -> SamplingParams:
        defaults = self._facts.sampling_defaults

        def number(key: str, low: float, high: float, neutral: float, *, open_low: bool = False) -> float:
            return fields.number(key, low, high, float(defaults.get(key, neutral)), open_low=open_low)

        temperature = number("temperature", 0.0, 2.0, 1.0)
        top_k = fields.integer("top_k", -1, INT64_MAX, int(defaults.get("top_k", 0)))
        most = max_tokens or self._facts.max_seq_len
        return SamplingParams(
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_k=top_k if 0 < top_k < self._facts.vocab_size else 0,
            top_p=number("top_p", 0.0, 1.0, 1.0, open_low=True),
            min_p=number("min_p", 0.0, 1.0, 0.0),
            repetition_penalty=number("repetition_penalty", 0.01, 10.0, 1.0),
            presence_penalty=number("presence_penalty", -2.0, 2.0, 0.0),
            frequency_penalty=number("frequency_penalty", -2.0, 2.0, 0.0),
            max_tokens=max_tokens,
            min_tokens=fields.integer("min_tokens", 0, most, 0),
            stop_ids=self._stop_ids(fields),
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else -1,
            logit_bias=self._logit_bias(fields),
        )

    def _seed(self, fields: Fields) -> int | None:
        if not fields.given("seed"):
            fields.get("seed")
            return None
        return fields.integer("seed", INT64_MIN, INT64_MAX, 0) & INT64_MAX

    def _stop(self, fields: Fields) -> tuple[str, ...]:
        value = fields.get("stop")
        if value is None:
            return ()
        single = isinstance(value, str)
        entries = [value] if single else fields.array("stop", MAX_STOPS) or []
        for index, entry in enumerate(entries):
            param = "stop" if single else f"stop[{index}]"
            if not isinstance(entry, str) or not entry:
                raise invalid_value(f"{param} must be a string that is not empty, got {shown(entry)}.", param)
            if len(entry.encode()) > MAX_STOP_BYTES:
                raise invalid_value(f"{param} must be at most {MAX_STOP_BYTES} bytes long.", param)
        return tuple(entries)

    def _stop_ids(self, fields: Fields) -> tuple[int, ...]:
        ids = fields.array("stop_token_ids", MAX_STOP_IDS) or []
        self._check_ids(ids, "stop_token_ids")
        return tuple(ids)

    def _logit_bias(self, fields: Fields) -> tuple[tuple[int, float], ...]:
        biases = fields.object("logit_bias") or {}
        if len(biases) > MAX_BIASES:
            raise invalid_value(f"logit_bias must have at most {MAX_BIASES} entries.", "logit_bias")
        reader = Fields(biases, "logit_bias")
        vocab = self._facts.vocab_size
        pairs = []
        for key in biases:
            if not _TOKEN_ID.match(key) or int(key) >= vocab:
                raise invalid_value(
                    f"logit_bias keys must be token ids from 0 to {vocab - 1}, got {shown(key)}.", "logit_bias"
                )
            if biases[key] is None:
                raise reader.refuse(key, "a number from -100 to 100", None)
            pairs.append((int(key), reader.number(key, -100.0, 100.0, 0.0)))
        return tuple(pairs)

    def _cache_salt(self, fields: Fields) -> str:
        salt = fields.string("cache_salt", max_bytes=MAX_SALT_BYTES)
        if salt == "":
            raise invalid_value("cache_salt must not be empty; leave it out instead.", "cache_salt")
        return salt or ""

    def _stream_options(self, fields: Fields, stream: bool) -> tuple[bool, bool]:
        options = fields.object("stream_options")
        if options is None:
            return False, False
        if not stream:
            raise invalid_value("stream_options needs stream: true.", "stream_options")
        reader = Fields(options, "stream_options")
        include_usage = reader.boolean("include_usage", False)
        return include_usage, reader.boolean("continuous_usage_stats", False) and include_usage

    def _request_id(self, fields: Fields) -> str | None:
        key = "request_id" if fields.given("request_id") else "rid"
        fields.get("request_id"), fields.get("rid")
        value = fields.string(key)
        if value is not None and not _REQUEST_ID.match(value):
            raise fields.refuse(key, "1 to 128 printable ASCII characters without spaces", value)
        return value


def usable_request_id(value: bytes) -> str | None:
    """The X-Request-Id header if it is fit to be echoed and logged."""
    try:
        text = value.decode("ascii")
    except UnicodeDecodeError:
        return None
    return text if _REQUEST_ID.match(text) else None
