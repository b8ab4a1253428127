"""Logging of every role: one line per event on standard error, pretty on a terminal and JSON otherwise.

A line carries time, level, role, logger, message and fields. Text that came from outside stands in fields or in the
message like any other: control characters are escaped in both formats, so that no request can forge a line or reach
the operator's terminal. Prompts and outputs are never logged.
"""

import json
import logging
import re
import sys
import time
from typing import Any, Literal, TextIO

from hybserve.core.types import CacheTruth, Timing

Format = Literal["auto", "pretty", "json"]
Level = Literal["debug", "info", "warning", "error"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_COLOURS = {"debug": "2", "info": "36", "warning": "33", "error": "31", "critical": "31;1"}
#: C0 and C1 controls, line and paragraph separators, direction marks and overrides, lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_FIELD = 2000  # characters of one field; a client can choose some of them
#: Third-party loggers that say at info what our own lines already say.
_QUIET = ("uvicorn.access", "uvicorn.error", "asyncio", "httpx", "urllib3", "filelock")


def escape(text: str) -> str:
    """``text`` on one line, nothing in it that a terminal would obey; long text is cut."""
    if len(text) > _MAX_FIELD:
        text = f"{text[:_MAX_FIELD]}… ({len(text)} characters)"
    return _UNSAFE.sub(_escape_one, text)


def _escape_one(match: re.Match[str]) -> str:
    code = ord(match.group())
    return {9: "\\t", 10: "\\n", 13: "\\r"}.get(code) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def setup(role: str, level: Level = "info", format: Format = "auto", stream: TextIO | None = None) -> None:
    """Make ``role`` log to ``stream`` (standard error). Replaces what was set up before; call it once per process."""
    stream = stream or sys.stderr
    pretty = format == "pretty" or (format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrettyFormatter(role, colours=stream.isatty()) if pretty else JsonFormatter(role))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(_LEVELS[level])
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.WARNING))
    logging.captureWarnings(True)


def event(logger: logging.Logger, level: Level, message: str, **fields: Any) -> None:
    """Log ``message`` with fields; values are numbers, strings, booleans, None or lists and dicts of these."""
    logger.log(_LEVELS[level], "%s", message, extra={"fields": fields})


def log_request(
    logger: logging.Logger,
    *,
    request_id: str,
    route: str,
    status: int,
    outcome: str,
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    cache: CacheTruth | None = None,
    timing: Timing | None = None,
    **fields: Any,
) -> None:
    """The one line of a request. ``outcome``: a finish reason, an error code or ``client_disconnect``."""
    values: dict[str, Any] = {"request": request_id, "route": route, "status": status, "outcome": outcome}
    if prompt_tokens or completion_tokens:
        values |= {"prompt": prompt_tokens, "completion": completion_tokens}
    if cache is not None:
        values |= {"hit": cache.hit, "kv_hit": cache.kv_hit, "state_hit": cache.state_hit, "reason": cache.reason}
    if timing is not None:
        values |= {"queue_ms": timing.queue, "ttft_ms": timing.ttft, "decode_ms": timing.decode}
        if timing.decode > 0 and completion_tokens > 1:
            values["tok_per_s"] = round(1000 * (completion_tokens - 1) / timing.decode, 1)
    level: Level = "error" if status >= 500 and status != 503 else "info"
    event(logger, level, "request", **values, **fields)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, ASCII only."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": escape(record.getMessage()),
        }
        entry |= {key: _tidy(value) for key, value in _fields(record).items()}
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True, default=lambda value: escape(str(value)))


class PrettyFormatter(logging.Formatter):
    """``12:03:05.123 info    api    request  status=200``; a traceback follows on lines of its own."""

    def __init__(self, role: str, colours: bool) -> None:
        super().__init__()
        self._role = role
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        at = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        head = f"{at} {level:<7} {self._role:<6}"
        if self._colours:
            head = f"\x1b[{_COLOURS.get(level, '0')}m{head}\x1b[0m"
        fields = " ".join(f"{key}={_plain(value)}" for key, value in _fields(record).items())
        line = f"{head} {escape(record.getMessage())}" + (f"  {fields}" if fields else "")
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n    {escape(part)}" for part in trace.splitlines())
        return line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _utc(seconds: float) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{stamp}.{int(seconds % 1 * 1000):03d}Z"


def _tidy(value: Any) -> Any:
    """Strings escaped and floats rounded, so that a line is short and safe to print."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, float):
        return round(value, 3)
    return value


def _plain(value: Any) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
    return json.dumps(text, ensure_ascii=False) if " " in text or text == "" else text
