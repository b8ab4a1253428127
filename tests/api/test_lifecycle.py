"""Loading, ready, lost, drain and stop, as clients and the parent see them."""

import json
import threading
import time

from hybserve.api.bridge import Bridge
from hybserve.api.status import Status
from hybserve.core.messages import Drain, Fatal, Heartbeat, Loading, MetricsSnapshot, Ready, Stop, Submit
from tests.api.conftest import parse_events, parse_response, read_all

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def in_background(live, body):
    """A request on a thread of its own; the result is in the list when the thread ends."""
    result: list = []
    thread = threading.Thread(target=lambda: result.append(live.request("POST", "/v1/chat/completions", body)))
    thread.start()
    live.wait(lambda: bool(live.text.submits()))
    return thread, result


def test_loading_then_ready(serve):
    live = serve(ready=False)
    assert live.get("/health")[0] == 200
    live.tell(Loading("weights", 0.25), Ready("text"))
    live.wait(lambda: live.role.status.progress == 0.25)
    status, headers, body = live.get("/health/ready")
    assert (status, body["status"], body["stage"], body["progress"]) == (503, "loading", "weights", 0.25)
    assert headers["retry-after"]
    status, _, body = live.post("/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"]) == (503, "model_loading")
    live.tell(Ready("engine"))
    live.wait(lambda: live.role.status.engine_ready)
    assert live.get("/health/ready")[2]["status"] == "ready"
    assert live.post("/v1/chat/completions", CHAT)[0] == 200


def test_metrics_of_all_roles(live):
    histogram = ([0.1, 1.0], [1, 2, 3], 4.5)
    live.tell(
        MetricsSnapshot(
            "engine",
            {'hybserve_pages{state="free"}': 7.0, 'hybserve_pages{state="live"}': 1.0},
            {"hybserve_steps_total": 5.0},
            {"hybserve_ttft_seconds": histogram},
        )
    )
    live.wait(lambda: "engine" in live.role.bridge.snapshots)
    text = live.get("/metrics")[2].decode()
    assert 'hybserve_pages{model_name="tiny",state="free"} 7.0' in text
    assert text.count("# TYPE hybserve_pages gauge") == 1
    assert 'hybserve_steps_total{model_name="tiny"} 5.0' in text
    assert 'hybserve_ttft_seconds_bucket{le="+Inf",model_name="tiny"} 3.0' in text
    assert 'hybserve_ttft_seconds_sum{model_name="tiny"} 4.5' in text


def test_f53_lost_engine_ends_everything_with_one_error(live):
    live.text.hold_at = 1
    thread, result = in_background(live, {**CHAT, "stream": True})
    live.wait(lambda: live.role.bridge.in_flight == 1)
    live.tell(Fatal("engine", "CUDA error at 0xdead in /secret"))
    thread.join(10)
    events = parse_events(result[0][2])
    assert events[-2]["error"]["code"] == "engine_unhealthy"
    assert events[-1] == "[DONE]"
    assert "secret" not in json.dumps(events)
    status, _, body = live.get("/health")
    assert (status, body["error"]["code"]) == (503, "engine_unhealthy")
    assert live.post("/v1/chat/completions", CHAT)[0] == 503


def test_f70_lost_link_ends_whole_answers_with_503(live):
    live.text.hold_at = 1
    thread, result = in_background(live, CHAT)
    live.call(live.text.channel.close)
    thread.join(10)
    status, headers, body = result[0]
    assert (status, json.loads(body)["error"]["code"]) == (503, "engine_unhealthy")
    assert headers["retry-after"]
    assert live.get("/health")[0] == 503


def test_stalled_engine_is_unhealthy_until_it_beats_again(serve):
    live = serve(stall_timeout=0.2)
    time.sleep(0.3)
    assert live.get("/health")[2]["error"]["code"] == "engine_unhealthy"
    live.tell(Heartbeat("engine", 1, False))
    assert live.get("/health")[0] == 200


def test_f17_drain_lets_running_requests_finish(live):
    live.text.hold_at = 1
    thread, result = in_background(live, {**CHAT, "stream": True})
    live.call(live.parent.send, [Drain()])
    live.wait(lambda: live.role.status.draining)
    status, _, body = live.get("/health/ready")
    assert (status, body["status"]) == (503, "draining")
    assert live.get("/health")[0] == 200
    status, headers, body = live.post("/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"]) == (503, "draining")
    assert headers["retry-after"]
    live.wait(lambda: any(isinstance(m, Drain) for m in live.text.received))
    live.loop.call_soon_threadsafe(live.text.released.set)
    thread.join(10)
    assert parse_events(result[0][2])[-2]["choices"][0]["finish_reason"] == "stop"
    live.join()


def test_f17_drain_timeout_ends_the_rest_with_an_error_event(serve):
    live = serve(drain_timeout=0.3)
    live.text.hold_at = 1
    thread, result = in_background(live, {**CHAT, "stream": True})
    live.call(live.parent.send, [Drain()])
    thread.join(10)
    events = parse_events(result[0][2])
    assert events[-2]["error"]["code"] == "draining"
    assert events[-1] == "[DONE]"
    live.join()


def test_f17_a_large_answer_leaves_whole_although_the_server_stops(live):
    live.text.words = ["x" * 8_000_000]
    body = json.dumps(CHAT).encode()
    with live.connect() as sock:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        sock.sendall(head + body)
        live.wait(lambda: bool(live.text.submits()))
        live.wait(lambda: live.role.bridge.in_flight == 0)
        live.call(live.parent.send, [Stop()])
        time.sleep(0.3)
        assert len(json.loads(parse_response(read_all(sock))[2])["choices"][0]["message"]["content"]) == 8_000_000
    live.join()


def test_f17_stop_during_a_drain_ends_at_once(live):
    live.text.hold_at = 1
    thread, result = in_background(live, CHAT)
    live.call(live.parent.send, [Drain()])
    live.wait(lambda: live.role.status.draining)
    live.call(live.parent.send, [Stop()])
    thread.join(10)
    assert result[0][0] == 503
    live.join()
    assert any(isinstance(m, Submit) for m in live.text.received)


def test_parent_gets_ready_and_heartbeats(live):
    messages: list = []
    while not {Ready, Heartbeat} <= set(map(type, messages)):
        messages += live.call(live.parent.receive)
    assert {m.role for m in messages} == {"api"}


def test_what_fails_in_the_background_ends_the_role(live):
    def broken(message):
        raise ZeroDivisionError

    live.role.bridge._deliver = broken
    live.tell(Heartbeat("engine", 1, False))
    live.join()
    assert isinstance(live.failure, ZeroDivisionError)


def test_uids_of_several_apis_never_meet():
    ours, theirs = (Bridge(None, index, Status(1.0), 1.0) for index in (0, 1))
    for bridge in (ours, theirs):
        bridge.status.ready("engine", time.monotonic())
    assert not set(ours.open(100).uids) & set(theirs.open(100).uids)
