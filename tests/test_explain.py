"""explain-miss against a server that speaks the public routes; a token is a character."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybserve.core.errors import ConfigError
from hybserve.explain import api_key, explain_miss

PAGE = 8
CACHE = {"kv_hit": 16, "state_hit": 8, "hit": 8, "reason": "no_checkpoint", "at": 16, "tiers": {}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {"data": [{"id": "tiny", "hybserve": {"page_size": PAGE}}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.asked.append((self.path, body, self.headers.get("Authorization")))
        if server.refusal is not None:
            status, message = server.refusal
            self.answer(status, {"error": {"message": message, "type": "x", "param": None, "code": "x"}})
        elif self.path == "/detokenize":
            self.answer(200, {"prompt": "".join(map(chr, body["tokens"]))})
        elif self.path == "/v1/chat/completions/render":
            self.render("".join(f"<{m['role']}>{m['content']}" for m in body["messages"]) + "<assistant>")
        elif self.path == "/v1/completions/render":
            self.render(body["prompt"])
        else:
            self.answer(404, {"error": {"message": "no such route"}})

    def render(self, text):
        ids = [ord(character) for character in text]
        self.answer(200, {"text": text, "token_ids": ids, "tokens": len(ids), "hybserve": {"cache": self.server.cache}})

    def answer(self, status, body):
        data = self.server.raw if self.server.raw is not None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.refusal, server.raw, server.cache = [], None, None, CACHE
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture
def write(tmp_path):
    def make(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return make


def chat(*contents, **fields):
    return {"messages": [{"role": "user", "content": content} for content in contents], **fields}


def test_two_conversations(server, write):
    a, b = write("a.json", chat("You are kind. Hello there")), write("b.json", chat("You are kind. Goodbye all"))
    report = explain_miss(a, b, server.url + "/", None).splitlines()
    assert len(report) <= 12
    assert report == [
        f"A: chat, 42 tokens ({a})",
        f"B: chat, 42 tokens ({b})",
        "First difference: token 20, in page 2 (pages of 8 tokens)",
        "  before  'u are kind. '",
        "  A has   'H' (id 72), then 'ello there<a'",
        "  B has   'G' (id 71), then 'oodbye all<a'",
        "They share 2 whole pages, 16 tokens.",
        "B would reuse 8 of its 42 tokens now: the nearest checkpoint stands at 8 (KV is there up to 16).",
        "Not deeper: no_checkpoint at 16: the KV goes on, but no recurrent state was kept there.",
    ]
    assert {path for path, _, _ in server.asked} == {"/v1/chat/completions/render", "/detokenize"}
    assert server.asked[0][1] == chat("You are kind. Hello there")


def test_plain_text_and_what_divergent_means(server, write):
    server.cache = {**CACHE, "hit": 0, "kv_hit": 0, "reason": "divergent", "at": 2}
    a, b = write("a.txt", b"{not JSON} \x1b[31m\n"), write("b.txt", "{not JSON} 🦜é\n".encode())
    report = explain_miss(a, b, server.url, None)
    assert r"A has   '\x1b' (id 27), then '[31m\n'" in report
    assert r"B has   '🦜' (id 129436), then 'é\n'" in report
    assert "B would reuse 0 of its 14 tokens now (KV is there up to 0)." in report
    assert report.splitlines()[-1].startswith("Not deeper: divergent at 2 ('o' (id 111), then 't JSON}")
    assert server.asked[0][:2] == ("/v1/completions/render", {"prompt": "{not JSON} \x1b[31m\n"})


def test_one_prompt_begins_with_the_other(server, write):
    report = explain_miss(write("a", b"12345678"), write("b", b"123456789"), server.url, None)
    assert "First difference: token 8, in page 1" in report
    assert "  A has   (ends here)" in report
    assert "  B has   '9' (id 57), then ''" in report
    assert "They share 1 whole pages, 8 tokens." in report


def test_no_difference(server, write):
    server.cache = {**CACHE, "reason": "full"}
    path = write("a.json", {"prompt": "x" * 20})
    report = explain_miss(path, path, server.url, None).splitlines()
    assert report[0] == f"A: completion, 20 tokens ({path})"
    assert report[2] == "No difference: the same 20 tokens, 2 whole pages of 8."
    assert report[-1].startswith("Not deeper: full at 16: all that can be reused is there")
    assert len(report) == 5


def test_salts_part_what_is_equal(server, write):
    one, other = write("a.json", chat("x", cache_salt="1")), write("b.json", chat("y", cache_salt="2"))
    report = explain_miss(one, other, server.url, None)
    assert "Their cache_salt differs, so they never share anything." in report
    assert len(report.splitlines()) <= 12


def test_a_reason_of_a_newer_server_is_shown_as_it_is(server, write):
    server.cache = {**CACHE, "reason": "moon_phase"}
    assert explain_miss(write("a", b"x"), write("b", b"y"), server.url, None).endswith("Not deeper: moon_phase at 16.")


def test_the_key_travels(server, write):
    explain_miss(write("a", b"x"), write("b", b"y"), server.url, "sésame")
    sent = {authorisation.encode("latin-1").decode() for _, _, authorisation in server.asked}
    assert sent == {"Bearer sésame"}


def refused(a, b, url, key=None):
    with pytest.raises(ConfigError) as caught:
        explain_miss(a, b, url, key)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", b"{", "is not valid JSON"),
        ("x.json", b"[" * 100_000, "is not valid JSON"),
        ("x.json", b"[1]", "neither messages nor prompt"),
        ("x.json", b"{}", "neither messages nor prompt"),
        ("x.txt", b"", "is empty"),
        ("x.txt", b"\xff\xfe", "is not UTF-8 text: invalid start byte at byte 0"),
    ],
)
def test_bad_files(server, write, name, content, words):
    bad, good = write(name, content), write("good", b"x")
    assert words in refused(bad, good, server.url)
    assert str(bad) in refused(good, bad, server.url)


def test_a_file_that_is_not_there(server, write, tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path / "none", write("b", b"x"), server.url)
    assert "cannot be read: Is a directory" in refused(tmp_path, write("b", b"x"), server.url)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999999", "http://[x"])
def test_what_is_not_a_url(write, url):
    path = write("a", b"x")
    assert "URL" in refused(path, path, url)


def test_no_server_there(write):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    path = write("a", b"x")
    message = refused(path, path, f"http://127.0.0.1:{port}")
    assert f"no answer from http://127.0.0.1:{port}" in message
    assert "is the server running" in message


def test_something_that_is_no_http_server(write):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            peer, _ = listener.accept()
            peer.recv(65536)
            peer.sendall(b"SSH-2.0-x\r\n\r\n")
            peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        path = write("a", b"x")
        assert "no answer from" in refused(path, path, f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)


def test_refusals_of_the_server(server, write):
    path = write("a", b"x")
    server.refusal = (400, "messages is required.")
    assert refused(path, path, server.url) == f"{server.url} refused {path}: messages is required."
    server.refusal = (401, "A valid API key is needed.")
    assert "--api-key-env" in refused(path, path, server.url)


@pytest.mark.parametrize("raw", [b"<html>", b"[]", b"{}", b'{"token_ids": 5}', b'{"token_ids": [1], "hybserve": {}}'])
def test_another_kind_of_server(server, write, raw):
    server.raw = raw
    path = write("a", b"x")
    assert "does not answer as this version of hybserve does" in refused(path, path, server.url)


def test_another_kind_of_cache_block(server, write):
    server.cache = {"hit": 1}
    path = write("a", b"x")
    assert "does not answer as this version of hybserve does" in refused(path, path, server.url)


def test_keys_by_the_name_of_their_variable():
    assert api_key(None, {}) is None
    assert api_key("KEY", {"KEY": " sesame\n"}) == "sesame"
    for environ in ({}, {"KEY": " "}, {"KEY": "a\nb"}):
        with pytest.raises(ConfigError, match="KEY"):
            api_key("KEY", environ)
