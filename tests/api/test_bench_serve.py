"""The load generator: its figures on made-up replies, and a small run against a live server."""

import json

import pytest

from bench.http_client import Reply
from bench.serve import arguments, main, summarise
from hybserve.core.errors import ErrorBody


def test_figures():
    good = Reply(200, 10.0, [10.1, 10.2, 10.4], 10.5, {"prompt_tokens": 7, "completion_tokens": 3}, None, True)
    bad = Reply(503, 10.0, [], 10.1, None, "full")
    figures = summarise([good, bad], 2.0)
    assert (figures["requests"], figures["failed"], figures["errors"]) == (2, 1, {"503: full": 1})
    assert figures["ttft_ms"]["p50"] == pytest.approx(100)
    assert figures["itl_ms"]["mean"] == pytest.approx(150)
    assert figures["tpot_ms"]["max"] == pytest.approx(150)
    assert figures["e2e_ms"]["p99"] == pytest.approx(500)
    assert (figures["output_tokens_per_s"], figures["total_tokens_per_s"]) == (1.5, 5.0)


@pytest.mark.parametrize(
    "options",
    [
        ["--concurrency", "3"],
        ["--rate", "200"],
        ["--api", "chat"],
        ["--prompts", "words"],
    ],
)
def test_a_run(live, tmp_path, options):
    out = tmp_path / "serve.json"
    code = main([
        "--url", live.url + "/v1/", "--requests", "10", "--input", "5", "--output", "4", "--warmup", "1",
        "--out", str(out), *options,
    ])  # fmt: skip
    report = json.loads(out.read_text())
    (run,) = report.pop("runs")
    report |= run
    assert code == (0 if report["valid"] else 1)
    results = report["results"]
    assert (results["requests"], results["failed"], results["output_tokens"]) == (10, 0, 40)
    assert results["ttft_ms"]["p50"] > 0
    assert {"date", "command", "revision", "hardware", "versions", "server", "load", "client"} <= set(report)
    submits = live.text.submits()
    assert len({str(submit.prompt) for submit in submits}) == 11
    assert all(submit.ignore_eos for submit in submits)


def test_one_run_for_each_concurrency_and_no_prompt_twice(live, tmp_path):
    out = tmp_path / "serve.json"
    main(["--url", live.url, "--requests", "4", "--warmup", "1", "--concurrency", "1", "3", "--out", str(out)])
    assert [run["load"]["concurrency"] for run in json.loads(out.read_text())["runs"]] == [1, 3]
    submits = live.text.submits()
    assert len({str(submit.prompt) for submit in submits}) == len(submits) == 10


def test_failures_are_counted_and_said(live, tmp_path, capsys):
    live.text.refusal = ErrorBody("no room", "server_error", "queue_full", None, 503, 1)
    out = tmp_path / "serve.json"
    assert main(["--url", live.url, "--requests", "3", "--warmup", "0", "--out", str(out)]) == 1
    assert "no room" in capsys.readouterr().out
    live.text.refusal = None
    live.text.fail_after = (2, ErrorBody("broke", "server_error", "engine_error", None, 500))
    assert main(["--url", live.url, "--requests", "3", "--warmup", "0", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["runs"][0]["results"]["errors"] == {"200: broke": 3}


@pytest.mark.parametrize("argv", [["--requests", "0"], ["--rate", "-1"], ["--api", "chat", "--prompts", "tokens"]])
def test_bad_options(argv):
    with pytest.raises(SystemExit):
        arguments(argv)
