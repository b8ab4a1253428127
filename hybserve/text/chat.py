"""Conversations to text: the model's Jinja chat template in an immutable sandbox.

Templates see what transformers' ``apply_chat_template`` shows them (the same filters, globals and tags), given messages
in one normal form. A template is a program that somebody else wrote: it runs only in the worker process, where a clock
and a memory limit end it, and its output is capped while it is made.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hybserve.core.errors import ModelError, RequestError, invalid_value, unsupported_parameter
from hybserve.core.messages import ChatPrompt
from hybserve.text.tokenize import refuse_surrogates, too_many_bytes

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_MARK = "CONTINUE_HERE_9f27"
#: A template that trims the text eats the space, which tells that it would have trimmed the text's own end too.
_OPEN_END = _MARK + " "
_MAX_DETAIL = 300  # characters of a template's own error message that a client gets to see

Message = dict[str, Any]


class ChatTemplates:
    """The templates of a model. ``names``: special tokens as template variables; sizes in bytes of UTF-8."""

    def __init__(self, templates: dict[str, str], names: dict[str, str], context: int, byte_limit: int) -> None:
        self._templates = templates
        self._names = names
        self._context = context
        self._limit = byte_limit
        for name, source in templates.items():
            try:
                _compile(source)
            except TemplateError as error:
                raise ModelError(f"the chat template {name!r} does not compile: {error}") from error

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a conversation. Raises RequestError: bad messages, a template that refuses or fails, too long."""
        source = self._source(prompt.template)
        template = _prepared(source)
        messages = _messages(prompt.messages_json)
        variables = self._names | _kwargs(prompt.template_kwargs_json)
        ending = _open_ending(messages, source) if prompt.continue_final_message else None
        if ending is not None and prompt.add_generation_prompt:
            raise invalid_value(
                "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
            )
        try:
            text = self._collect(
                template.generate(
                    messages=messages,
                    tools=None,
                    documents=None,
                    add_generation_prompt=prompt.add_generation_prompt,
                    **variables,
                )
            )
        except RequestError:
            raise
        except TemplateError as error:
            detail = str(error.message or "no reason given")[:_MAX_DETAIL]
            raise invalid_value(f"The chat template refused the conversation: {detail}", "messages") from error
        except Exception as error:  # whatever a template's expressions can raise is the request's failure, not ours
            raise invalid_value("The chat template cannot render these messages.", "messages") from error
        if ending is not None:
            text = _cut_at_mark(text, ending)
        refuse_surrogates(text, "messages")
        return text

    def _source(self, override: str | None) -> str:
        if override is not None:
            return override
        if "default" not in self._templates:
            raise unsupported_parameter(
                "This model has no chat template; use /v1/completions with a prompt instead.", "messages"
            )
        return self._templates["default"]

    def _collect(self, pieces: Any) -> str:
        """Join what the template yields; stop it when the output cannot fit the context any more."""
        parts, size = [], 0
        for piece in pieces:
            parts.append(piece)
            size += len(piece)
            if size > self._limit:
                raise too_many_bytes(size, self._limit, self._context, "messages")
        return "".join(parts)


def _messages(raw: bytes) -> list[Message]:
    """The messages, already in their normal form (content a string, one name for reasoning), as templates expect them:
    without nulls, and with the thinking also under the name that some templates read. Raises RequestError."""
    try:
        messages = msgspec.json.decode(raw, type=list[dict[str, Any]])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_value(
            "messages must be a list of objects without halves of surrogate pairs.", "messages"
        ) from error
    if not messages:
        raise invalid_value("messages must have at least one message.", "messages")
    return [_message(message) for message in messages]


def _message(raw: Message) -> Message:
    message = {key: value for key, value in raw.items() if value is not None}
    if "reasoning_content" in message:
        message = {"thinking": message["reasoning_content"], **message}
    return message


def _kwargs(raw: bytes) -> dict[str, Any]:
    """The request's own template variables. They may replace special tokens, never what the server passes."""
    try:
        kwargs = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_value("chat_template_kwargs must be an object.", "chat_template_kwargs") from error
    for name in _RESERVED:
        if name in kwargs:
            at = f"chat_template_kwargs.{name}"
            raise invalid_value(f"{at} is set by the server; use the request's own field.", at)
    return kwargs


def _open_ending(messages: list[Message], source: str) -> str:
    """Mark the end of the last message, so that the rendered text can be cut there; its text before the mark."""
    content = messages[-1].get("content")
    if "content" not in source or not content or not isinstance(content, str):
        raise invalid_value("continue_final_message needs a last message with text.", "continue_final_message")
    messages[-1]["content"] = content + _OPEN_END
    return content


def _cut_at_mark(text: str, ending: str) -> str:
    at = text.rfind(_MARK)
    if at < 0 or ending.strip() not in text:
        raise invalid_value(
            "The chat template changes or drops the last message, so it cannot be continued.", "continue_final_message"
        )
    return text[:at] if text.startswith(_OPEN_END, at) else text[:at].rstrip()


@lru_cache(maxsize=32)
def _prepared(source: str) -> Any:
    """A compiled template, remembered. Raises RequestError."""
    try:
        return _compile(source)
    except TemplateError as error:
        detail = str(error.message or "syntax error")[:_MAX_DETAIL]
        raise invalid_value(f"The chat template does not compile: {detail}", "chat_template") from error


def _compile(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["namespace"] = _SafeNamespace
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike the built-in filter this escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _SafeNamespace(Namespace):
    """No names with a leading underscore: templates of strangers must not reach Python's inner attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_inner(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_inner(name)
        super().__setitem__(name, value)


def _refuse_inner(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template must not set {name!r}")


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())
