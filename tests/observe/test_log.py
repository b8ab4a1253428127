"""Log lines: one event is one line in both formats, whatever the text in it."""

import io
import json
import logging

import pytest

from hybserve.core.types import CacheTruth, Timing
from hybserve.observe import log

NASTY = "a\nb\r\x1b[31mred\x1b[0m\x00\x85\u2028\u202eevil\ud800\x7f\tend"


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)


def lines(format, write, level="info"):
    stream = io.StringIO()
    log.setup("api", level, format, stream)
    write(logging.getLogger("hybserve.test"))
    return stream.getvalue().split("\n")[:-1]


def test_json_is_the_format_of_pipes_and_carries_the_role():
    (line,) = lines("auto", lambda logger: log.event(logger, "info", "started", port=8000, share=0.12345))
    entry = json.loads(line)
    assert entry["role"] == "api"
    assert entry["level"] == "info"
    assert entry["message"] == "started"
    assert entry["port"] == 8000
    assert entry["share"] == 0.123
    assert entry["time"].endswith("Z")


def test_pretty_is_the_format_of_terminals(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    log.setup("text", "info", "auto", stream)
    log.event(logging.getLogger("x"), "warning", "slow", seconds=1.25, name="two words")
    line = stream.getvalue()
    assert line.startswith("\x1b[33m")
    assert line.rstrip("\n").endswith('slow  seconds=1.2 name="two words"')


def test_pretty_without_a_terminal_has_no_colours():
    (line,) = lines("pretty", lambda logger: logger.info("hello"))
    assert "\x1b" not in line
    assert " info    api    hello" in line


@pytest.mark.parametrize("format", ["json", "pretty"])
def test_F43_controls_in_messages_and_fields_are_escaped(format):
    written = lines(format, lambda logger: log.event(logger, "info", NASTY, user=NASTY, request=NASTY))
    assert len(written) == 1
    assert not [char for char in written[0] if ord(char) < 32 or char in "\x7f\x85\u2028\u202e\ud800"]
    assert "\\x1b" in written[0]


@pytest.mark.parametrize("format", ["json", "pretty"])
def test_F43_controls_in_tracebacks_cannot_reach_the_terminal(format):
    def write(logger):
        try:
            raise ValueError("\x1b[2J\x07")
        except ValueError:
            logger.exception("failed")

    written = "\n".join(lines(format, write))
    assert "\x1b" not in written
    assert "\x07" not in written
    assert "ValueError" in written


def test_F43_the_surrogate_of_a_broken_string_can_be_written():
    written = lines("pretty", lambda logger: logger.info("x\udfff"))
    assert written[0].encode().endswith(b"x\\udfff")


def test_long_fields_are_cut():
    (line,) = lines("json", lambda logger: log.event(logger, "info", "x", user="y" * 1_000_000))
    assert len(line) < 3000
    assert "1000000 characters" in json.loads(line)["user"].replace("\\u2026", "")


def test_levels():
    assert lines("json", lambda logger: logger.info("x"), level="warning") == []
    assert len(lines("json", lambda logger: logger.debug("x"), level="debug")) == 1


def test_warnings_become_lines():
    import warnings

    (line,) = lines("json", lambda _: warnings.warn("old", stacklevel=1))
    assert "old" in json.loads(line)["message"]


def test_the_request_line_tells_the_truth_about_the_cache():
    cache = CacheTruth(kv_hit=9, state_hit=8, hit=8, reason="no_checkpoint")
    (line,) = lines(
        "json",
        lambda logger: log.log_request(
            logger,
            request_id="r1",
            route="/v1/completions",
            status=200,
            outcome="stop",
            prompt_tokens=10,
            completion_tokens=11,
            cache=cache,
            timing=Timing(queue=1.0, ttft=5.0, decode=100.0),
            key="k",
        ),
    )
    entry = json.loads(line)
    assert (entry["hit"], entry["kv_hit"], entry["reason"]) == (8, 9, "no_checkpoint")
    assert (entry["ttft_ms"], entry["tok_per_s"], entry["key"]) == (5.0, 100.0, "k")


def test_server_errors_are_logged_as_errors_and_full_queues_are_not():
    def write(logger):
        for status in (500, 503, 400):
            log.log_request(logger, request_id="r", route="/", status=status, outcome="x")

    assert [json.loads(line)["level"] for line in lines("json", write)] == ["error", "info", "info"]
