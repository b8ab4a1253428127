"""Hostile and clumsy clients against a live server, over raw sockets."""

import asyncio
import contextlib
import hashlib
import json
import random
import resource
import socket
import time

import pytest

from hybserve.api.auth import OPEN_PATHS
from tests.api.conftest import parse_events, parse_response, read_all

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KEY = {"Authorization": "Bearer sesame"}


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@pytest.fixture
def guarded(serve):
    return serve(key_digests=(digest(b"sesame"),))


def error_of(data: bytes) -> tuple[int, str]:
    status, _, body = parse_response(data)
    return status, json.loads(body)["error"]["code"]


def test_f01_silent_and_dripping_connections_are_closed(serve):
    live = serve(header_timeout=0.3)
    silent = [live.connect() for _ in range(50)]
    silent[0].sendall(b"GET /health HT")
    silent[1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    assert live.get("/health")[0] == 200  # others are served meanwhile
    began = time.monotonic()
    assert [read_all(sock) for sock in silent] == [b""] * 50
    assert time.monotonic() - began < 10
    for sock in silent:
        sock.close()
    assert "hybserve_http_header_timeouts_total" in live.get("/metrics")[2].decode()


def test_f01_half_a_second_request_on_a_kept_connection(serve):
    live = serve(header_timeout=0.3)
    with live.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        while b'"ok"}' not in sock.recv(4096):
            pass
        sock.sendall(b"GET /hea")
        assert read_all(sock) == b""


def test_f02_trickled_body(serve):
    live = serve(body_timeout=0.3)
    with live.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        for _ in range(3):
            time.sleep(0.05)
            sock.sendall(b" ")
        assert error_of(read_all(sock)) == (408, "request_timeout")


@pytest.mark.parametrize(
    "head",
    [
        b"X-Big: " + b"a" * (5 << 20),
        b"\r\n".join(b"X-%d: y" % i for i in range(10_000)),
        b"X-Big: " + b"a" * 70_000,
        b"\r\n".join(b"X-%d: y" % i for i in range(300)),
    ],
    ids=["one-of-5MB", "10k", "one-of-70KB", "300-small"],
)
def test_f03_oversized_headers(live, head):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = live.raw(b"GET /version HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
    if data:
        assert error_of(data) == (431, "headers_too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 * 1024  # KiB; the client's copy included
    assert live.get("/health")[0] == 200


def test_long_url(live):
    for length in (10_000, 100_000):
        data = live.raw(b"GET /" + b"a" * length + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert error_of(data) == (414, "url_too_long")
    data = live.raw(b"GET /version?" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert error_of(data) == (414, "url_too_long")


def test_f04_body_too_large(serve):
    live = serve(max_body=1000, linger=0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    declared = live.raw(head + b"Content-Length: 200000000\r\n\r\n")  # refused before a byte of it is sent
    assert error_of(declared) == (413, "body_too_large")
    assert error_of(live.raw(head + b"Content-Length: 2000\r\n\r\n" + b" " * 2000)) == (413, "body_too_large")
    chunk = b"1f4\r\n" + b" " * 500 + b"\r\n"
    assert error_of(live.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3)) == (413, "body_too_large")
    assert error_of(live.raw(head + b"Content-Length: 99999999999999999999\r\n\r\n"))[0] in (400, 413)
    assert live.get("/health")[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: -1",
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: abc",
        b"Content-Length: +5",
        b"Transfer-Encoding: gzip",
        b"Broken header",
    ],
)
def test_f04_lying_or_broken_framing(live, head):
    data = live.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n{}")
    assert error_of(data)[0] in (400, 501)


def test_f04_body_shorter_than_announced(live):
    with live.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{}")
        sock.shutdown(socket.SHUT_WR)
        assert error_of(read_all(sock)) == (400, "invalid_value")


def test_f04_broken_chunk(live):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert error_of(live.raw(head + b"zz\r\n"))[0] == 400


def test_f06_compressed_body(live):
    status, _, body = live.post("/v1/completions", b"\x1f\x8b\x08", {"Content-Encoding": "gzip"})
    assert (status, body["error"]["code"]) == (415, "unsupported_encoding")
    assert live.post("/v1/chat/completions", CHAT, {"Content-Encoding": "identity"})[0] == 200


def test_not_http_at_all(live):
    assert error_of(live.raw(b"\x16\x03\x01\x02\x00garbage\r\n\r\n"))[0] == 400


def test_pipelined_requests_are_answered_in_order(live):
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    two = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    data = live.raw(one + two)
    assert data.index(b'{"version"') < data.index(b'{"status":"ok"}')


def test_f07_host_header_tricks_need_a_key(guarded):
    for route in guarded.role.server.config.app.routes:
        path = route.path.replace("{name:path}", "tiny")
        if path in OPEN_PATHS or path == "/metrics":
            continue
        for host in (b"x/health?", b"x/health#", b"/health"):
            request = b"GET " + path.encode() + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
            assert parse_response(guarded.raw(request))[0] == 401


def test_f08_default_deny(guarded):
    """Every route, existing or not, in every spelling and method, wants a key; health does not."""
    paths = [route.path.replace("{name:path}", "tiny") for route in guarded.role.server.config.app.routes]
    odd = ["/", "//v1/models", "/v1/%2e%2e/health", "/V1/models", "/v1/models/", "/health/../v1/models", "/admin", "*"]
    odd += ["/health/x", "/healthz", "/v1/models?/health", "/health;/../v1/models", "/%76%31/models"]
    for path in [*paths, *odd]:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "TRACE", "DELETE"):
            status, headers, _ = guarded.request(method, path)
            if path in (*OPEN_PATHS, "/metrics"):
                assert status == (200 if method in ("GET", "HEAD") else 405), (method, path)
            else:
                assert status == 401, (method, path)
                assert headers["www-authenticate"] == "bearer"  # the test client lowers values


def test_f08_with_a_key_odd_paths_are_404_or_405(guarded):
    expected = {
        ("GET", "//v1//models"): 200,
        ("GET", "/v1/models/"): 200,
        ("GET", "/v1/%2e%2e/health"): 404,
        ("GET", "/V1/models"): 404,
        ("GET", "/"): 404,
        ("HEAD", "/v1/models"): 200,
        ("OPTIONS", "/v1/models"): 405,
        ("TRACE", "/v1/models"): 405,
        ("GET", "/v1/chat/completions"): 405,
        ("DELETE", "/tokenize"): 405,
        ("POST", "/v1/embeddings"): 404,
        ("POST", "/v1/responses"): 404,
        ("POST", "/v1/messages"): 404,
    }
    for (method, path), want in expected.items():
        status, headers, body = guarded.request(method, path, headers=KEY)
        assert status == want, (method, path)
        if want in (404, 405) and method != "HEAD":
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
        if want == 405:
            assert headers["allow"]
    assert b"embeddings" in guarded.request("POST", "/v1/embeddings", headers=KEY)[2]


def test_metrics_behind_a_proxy_needs_a_key(guarded):
    assert guarded.request("GET", "/metrics")[0] == 200
    assert guarded.request("GET", "/metrics", headers={"X-Forwarded-For": "1.2.3.4"})[0] == 401


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"Authorization: Bearer wrong\r\n",
        b"Authorization: Bearer \xff\xfe\r\n",
        b"Authorization: Bearer\r\n",
        b"Authorization: Bearer \r\n",
        b"Authorization: sesame\r\n",
        b"Authorization: Basic sesame\r\n",
        b"Authorization: Bearer sesame\r\nAuthorization: Bearer sesame\r\n",
        b"Authorization: Bearer sesame x\r\n",
    ],
)
def test_f09_bad_keys(guarded, lines):
    data = guarded.raw(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n")
    assert error_of(data) == (401, "invalid_api_key")


def test_f40_tenant_comes_from_the_key(serve):
    live = serve(key_digests=(digest(b"sesame"), digest(b"other")))
    for key in ("sesame", "other", "sesame"):
        body = {**CHAT, "cache_salt": "s"}
        assert live.post("/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})[0] == 200
    first, second, third = (submit.tenant for submit in live.text.submits())
    assert first == third != second
    assert "sesame" not in first


@pytest.mark.parametrize("phase", ["before_accept", "before_first_token", "mid_stream"])
@pytest.mark.parametrize("stream", [True, False])
def test_f11_a_client_that_hangs_up_is_cancelled(live, phase, stream):
    live.text.hold_accept = phase == "before_accept"
    live.text.hold_at = {"before_first_token": 0, "mid_stream": 2}.get(phase)
    body = json.dumps({**CHAT, "stream": stream}).encode()
    with live.connect() as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        live.wait(lambda: bool(live.text.submits()))
        if stream and phase == "mid_stream":
            while b"Hello" not in sock.recv(65536):
                pass
    live.wait(lambda: len(live.text.cancelled) == 1)
    live.wait(lambda: live.role.bridge.in_flight == 0)
    live.text.released.set()
    status = 'hybserve_http_requests_total{model_name="tiny",route="/v1/chat/completions",status="499"} 1.0'
    assert status in live.get("/metrics")[2].decode()


def test_f13_cancellation_storm(live):
    live.text.hold_at = 1
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(live.connect()).sendall(head + body)
        live.wait(lambda: len(live.text.submits()) == 300)
    live.wait(lambda: live.role.bridge.in_flight == 0, 20)
    live.wait(lambda: len(live.text.cancelled) == 300)
    live.text.hold_at = None
    assert live.post("/v1/chat/completions", CHAT)[0] == 200


def test_f14_more_connections_than_the_limit(serve):
    live = serve(max_connections=10)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(live.connect())
        live.wait(lambda: len(live.role.server.server_state.connections) == 20)
        status, headers, body = live.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "queue_full", "1")
        assert live.get("/health")[0] == 200
        assert live.get("/metrics")[0] == 200
        for _ in range(80):
            stack.enter_context(live.connect())
    live.wait(lambda: not live.role.server.server_state.connections)
    assert live.post("/v1/chat/completions", CHAT)[0] == 200


def test_a_client_that_reads_nothing_is_cut_off(serve):
    live = serve(write_timeout=0.3)
    live.text.words = ["x" * 200_000] * 200
    body = json.dumps({**CHAT, "stream": True}).encode()
    with live.connect() as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        live.wait(lambda: bool(live.text.submits()))
        live.wait(lambda: live.role.bridge.in_flight == 0)
    assert "hybserve_http_write_timeouts_total" in live.get("/metrics")[2].decode()


def test_f43_ids_cannot_forge_log_lines(live, caplog):
    with caplog.at_level("INFO"):
        headers = live.post("/v1/chat/completions", {**CHAT, "user": "a\nb"}, {"X-Request-Id": "x y\x1b[31m"})[1]
        assert "x y" not in headers["x-request-id"]
        assert live.post("/v1/chat/completions", {**CHAT, "request_id": "a\nb"})[0] == 400
        live.wait(lambda: sum(hasattr(r, "fields") for r in caplog.records) >= 2)
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert lines[0]["outcome"] == "stop"
    assert lines[0]["hit"] == 1
    assert "hi" not in json.dumps(lines).split('"')  # no prompts


def test_errors_never_name_classes_or_paths(live):
    def explode(submit):
        raise ZeroDivisionError("secret /path")

    live.role.bridge.send = explode
    status, _, body = live.post("/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"]) == (500, "engine_error")
    assert "ZeroDivision" not in json.dumps(body)
    assert "secret" not in json.dumps(body)


class LagProbe:
    """Longest pause of a server's event loop while the block runs, in seconds."""

    def __init__(self, live):
        self._live = live
        self.worst = 0.0

    async def _watch(self):
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.worst = max(self.worst, time.monotonic() - began - 0.005)

    def __enter__(self):
        self._task = asyncio.run_coroutine_threadsafe(self._watch(), self._live.loop)
        return self

    def __exit__(self, *error):
        self._task.cancel()


@pytest.mark.parametrize(
    "prompt",
    [b'"' + b"a" * 40_000_000 + b'"', b'"' + b" [" * 2_000_000 + b'"', b"[" + b"1," * 4_000_000 + b"1]"],
    ids=["string", "brackets", "ids"],
)
def test_f19_f31_huge_bodies_do_not_stop_the_loop(live, prompt):
    body = b'{"prompt":' + prompt + b"}"
    with LagProbe(live) as probe:
        status, _, error = live.post("/v1/completions", body)
    assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
    assert probe.worst < 2  # ten times what it may be, and the client shares this process


def test_all_bodies_together_are_bounded(serve):
    live = serve(max_body=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(live.connect()).sendall(head + b" " * 990)
        live.wait(lambda: len(live.role.server.server_state.connections) == 8)
        status = parse_response(live.raw(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b" " * 999))[0]
        assert status == 503
    live.wait(lambda: not live.role.server.server_state.connections)
    assert live.post("/v1/completions", {"prompt": "x"})[0] == 200


def test_http_1_0_streams_to_the_end(live):
    body = json.dumps({**CHAT, "stream": True}).encode()
    data = live.raw(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert data.endswith(b"data: [DONE]\n\n")


def test_a_kept_connection_serves_streams_one_after_another(live):
    body = json.dumps({**CHAT, "stream": True}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with live.connect() as sock:
        for _ in range(3):
            sock.sendall(request)
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += sock.recv(65536)
            assert parse_events(parse_response(data)[2])[-1] == "[DONE]"


def test_f20_garbage_never_breaks_the_server(live):
    """Random bytes, and valid requests with a few bytes changed: an HTTP answer or a closed connection, never a 5xx."""
    dice = random.Random(7)
    body = json.dumps({**CHAT, "max_tokens": 2}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    good = head % len(body) + body
    for trial in range(150):
        data = bytearray(dice.randbytes(dice.randrange(1, 200)) if trial % 5 == 0 else good)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        with live.connect() as sock:
            sock.sendall(bytes(data))
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            answer = read_all(sock)
        assert not answer.startswith(b"HTTP/1.1 5"), (bytes(data), answer)
    assert live.post("/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "body-after-the-answer"])
def test_a_refused_body_does_not_spoil_the_connection(guarded, late):
    body = b" " * 300_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with guarded.connect() as sock:
        sock.sendall(head if late else head + body)
        data = b""
        while b"invalid_api_key" not in data:
            data += sock.recv(65536)
        if late:
            sock.sendall(body)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(sock).endswith(b'{"status":"ok"}')


def test_an_endless_refused_body_ends_with_the_header_deadline(serve):
    live = serve(key_digests=(digest(b"sesame"),), header_timeout=0.3)
    with live.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 10:
                sock.sendall(b" ")
                time.sleep(0.02)
        assert time.monotonic() - began < 10
