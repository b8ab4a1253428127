"""Whole servers under signals and sudden death: what clients see, what the exit code is, what is left behind."""

import contextlib
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.random_model import ensure_random_model

EVIL = str(Path(__file__).with_name("evil_serve.py"))
#: A request that runs until something ends it.
ENDLESS = {"prompt": "endless", "max_tokens": 20_000, "ignore_eos": True}


def descendants(server):
    return server.process.children(recursive=True)


def begin(server, **body):
    """A stream that has brought its first event."""
    stream = server.open_stream(**{**ENDLESS, **body})
    assert stream.status == 200
    events = stream.events()
    next(events)
    return events


def the_end(events):
    """The last event before [DONE], which must come."""
    events = list(events)
    assert events[-1] == "[DONE]"
    return events[-2]


def test_F17_drain_lets_running_requests_finish(start_server, no_orphans):
    server = start_server().wait_until_ready()
    everyone = descendants(server)
    events = begin(server, max_tokens=250)
    server.signal(signal.SIGTERM)
    deadline = time.monotonic() + 30
    while server.request("GET", "/health/ready")[0] != 503:
        assert time.monotonic() < deadline
    status, _, body = server.request("POST", "/v1/completions", {"prompt": "x"})
    assert (status, body["error"]["code"]) == (503, "draining")
    assert the_end(events)["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0
    no_orphans(everyone)


def test_F17_what_is_not_done_in_time_ends_with_an_error_event(start_server, no_orphans):
    server = start_server("server.drain_timeout=1s").wait_until_ready()
    everyone = descendants(server)
    events = begin(server)
    server.signal(signal.SIGINT)
    assert the_end(events)["error"]["code"] == "draining"
    assert server.wait() == 0
    no_orphans(everyone)


def test_F17_a_second_signal_ends_it_now(start_server, no_orphans):
    server = start_server("server.drain_timeout=600s").wait_until_ready()
    everyone = descendants(server)
    events = begin(server)
    server.signal(signal.SIGTERM)
    time.sleep(0.5)
    server.signal(signal.SIGTERM)
    assert the_end(events)["error"]["code"] == "draining"
    assert server.wait(30) == 0
    no_orphans(everyone)


@pytest.mark.parametrize("role", ["engine", "text"])
def test_F70_a_killed_role_ends_every_request_with_one_error(start_server, no_orphans, role):
    server = start_server().wait_until_ready()
    everyone = descendants(server)
    streams = [begin(server) for _ in range(3)]
    server.role(role).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for events in streams:
        assert the_end(events)["error"]["type"] == "server_error"
    assert server.wait() == 1
    assert time.monotonic() - killed < 60
    assert any(role in line and "SIGKILL" in line for line in server.noise)
    no_orphans(everyone)


def test_F70_a_killed_api_ends_the_server(start_server, no_orphans):
    server = start_server().wait_until_ready()
    everyone = descendants(server)
    begin(server)
    server.role("api").send_signal(signal.SIGKILL)
    assert server.wait() == 1
    no_orphans(everyone)


def test_F70_a_role_killed_while_loading_ends_the_start(start_server, no_orphans):
    server = start_server()
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        try:
            engine = server.role("engine")
            break
        except AssertionError:
            time.sleep(0.02)
    everyone = descendants(server)
    engine.send_signal(signal.SIGKILL)
    assert server.wait() == 1
    assert server.url == ""
    no_orphans(everyone)


def test_F17_a_signal_while_loading_ends_the_start(start_server, no_orphans):
    server = start_server()
    while not server.process.children():
        time.sleep(0.02)
    server.signal(signal.SIGTERM)
    everyone = descendants(server)
    assert server.wait() in (0, -signal.SIGTERM)  # the latter before the handler stands
    no_orphans(everyone)


def truncated_tokenizer(directory):
    (directory / "tokenizer.json").write_text("{}")


def not_finite(directory):
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # an fp32 NaN
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("hurt", "named"), [(truncated_tokenizer, "tokenizer.json"), (not_finite, "model.safetensors")]
)
def test_F77_F84_a_model_that_a_role_refuses_is_exit_4(start_server, no_orphans, tmp_path, hurt, named):
    directory = tmp_path / "model"
    shutil.copytree(ensure_random_model(), directory)
    hurt(directory)
    server = start_server(f"model.path={directory}")
    everyone = set()
    while server.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            everyone.update(descendants(server))
        time.sleep(0.05)
    assert server.wait() == 4
    assert server.url == ""
    assert any(line.startswith("hybserve: ") and named in line for line in server.noise), server.noise
    assert len(everyone) >= 3
    no_orphans(everyone)


def test_F70_a_killed_text_worker_is_replaced(start_server, no_orphans):
    server = start_server().wait_until_ready()
    (worker,) = server.role("text").children()
    worker.kill()
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    deadline = time.monotonic() + 60
    while server.request("POST", "/v1/chat/completions", body)[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    everyone = descendants(server)
    assert worker not in everyone
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    no_orphans(everyone)


def test_F71_nothing_outlives_a_killed_parent(start_server, no_orphans):
    server = start_server().wait_until_ready()
    everyone = descendants(server)
    assert len(everyone) == 4  # api, text and its worker, engine
    begin(server)
    server.signal(signal.SIGKILL)
    server.wait()
    no_orphans(everyone)


def test_F72_a_stopped_engine_is_noticed_and_its_stacks_are_dumped(start_server, no_orphans, tmp_path):
    env = {"EVIL_SILENCE": "10", "EVIL_FILE": str(tmp_path / "never")}
    server = start_server(script=EVIL, env=env).wait_until_ready()
    everyone = descendants(server)
    events = begin(server)
    server.role("engine").suspend()
    assert the_end(events)["error"]["type"] == "server_error"
    assert server.wait() == 1
    assert any("most recent call first" in line for line in server.noise)
    no_orphans(everyone)


def test_F53_a_forward_that_fails_ends_the_server_in_order(start_server, no_orphans, tmp_path):
    trigger = tmp_path / "trigger"
    server = start_server(script=EVIL, env={"EVIL_SILENCE": "60", "EVIL_FILE": str(trigger)}).wait_until_ready()
    everyone = descendants(server)
    streams = [begin(server) for _ in range(3)]
    trigger.touch()
    failed = time.monotonic()
    for events in streams:
        error = the_end(events)["error"]
        assert error["type"] == "server_error"
        assert "device is lost" not in error["message"]
    assert server.wait() == 1
    assert time.monotonic() - failed < 60
    no_orphans(everyone)


def test_F78_a_server_has_no_zombies(live_server):
    status, _, body = live_server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert status == 200, body
    states = [process.status() for process in descendants(live_server)]
    assert len(states) == 4
    assert psutil.STATUS_ZOMBIE not in states
