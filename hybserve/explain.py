"""Why one prompt does not reuse another: ``hybserve explain-miss``, asked of a running server.

A question file holds the JSON body of a chat completion (``messages``) or of a completion (``prompt``), or plain text.
Everything here is plain HTTP to public routes; nothing is loaded, nothing on the server changes.
"""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hybserve.core.errors import ConfigError

TIMEOUT = 60.0  # seconds for one answer
#: Tokens of context shown before and after the first difference, and the characters they may take.
CONTEXT, WIDTH = 12, 48

_WORDS = {
    "full": "all that can be reused is there; at least one token is always computed",
    "cold": "nothing is cached for this key and cache_salt",
    "new": "nothing longer has been seen yet",
    "divergent": "what is cached goes on differently",
    "no_checkpoint": "the KV goes on, but no recurrent state was kept there",
    "evicted_state": "the recurrent state there was evicted, its KV was not",
    "evicted_kv": "what stood there was evicted",
    "pending": "a running request is still writing it",
    "corrupt": "what was stored there failed its check",
    "off": "the prefix cache is off (cache.prefix)",
}


@dataclass(frozen=True)
class Prompt:
    """A rendered question. ``salt`` is its cache_salt; ``cache`` the server's word on what it would reuse now."""

    file: Path
    kind: str
    salt: str
    ids: list[int]
    cache: dict[str, Any]


def explain_miss(first: Path, second: Path, url: str, key: str | None) -> str:
    """A report of at most 12 lines. Raises ConfigError: a bad file, no server there, a refusal of the server."""
    server = Server(url, key)
    a, b = (_rendered(server, path) for path in (first, second))
    page = _page_size(server)
    lines = [
        f"{name}: {prompt.kind}, {len(prompt.ids)} tokens ({prompt.file})" for name, prompt in (("A", a), ("B", b))
    ]
    lines += _difference(server, a, b, page)
    if a.salt != b.salt:
        lines.append("Their cache_salt differs, so they never share anything.")
    return "\n".join([*lines, *_reuse(server, b)])


class Server:
    """A running server. Every failure is a ConfigError that says what to do."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        try:
            parts = urlsplit(self._url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"{url!r} is not the URL of a server; write it as http://HOST:PORT")
        self._secure = parts.scheme == "https"
        self._path = parts.path.removesuffix("/v1")
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = b"Bearer " + key.encode()

    def ask(self, method: str, path: str, body: Any = None, about: str = "the request") -> Any:
        """The JSON of an answer; ``about`` names what a refusal is about."""
        status, data = self._exchange(method, path, None if body is None else json.dumps(body).encode())
        try:
            answer = json.loads(data)
            if status == 200:
                return answer
            message = answer["error"]["message"]
        except (ValueError, KeyError, TypeError):
            raise self.strange(f"status {status} for {path}") from None
        hint = " Name the variable that holds the key: --api-key-env NAME." if status == 401 else ""
        raise ConfigError(f"{self._url} refused {about}: {message}{hint}")

    def strange(self, what: str) -> ConfigError:
        return ConfigError(f"{self._url} does not answer as this version of hybserve does: {what}")

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host or "", self._port, timeout=TIMEOUT)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(
                f"no answer from {self._url} ({reason}); is the server running, and is this its URL?"
            ) from (error)
        finally:
            connection.close()


def api_key(variable: str | None, environ: Mapping[str, str]) -> str | None:
    """The key that the environment variable of this name holds. Raises ConfigError."""
    if variable is None:
        return None
    key = environ.get(variable, "").strip()
    if not key or not key.isprintable():
        raise ConfigError(f"the environment variable {variable} does not hold an API key")
    return key


def _rendered(server: Server, path: Path) -> Prompt:
    route, body, kind = _question(path)
    answer = server.ask("POST", route, body, about=str(path))
    try:
        ids, cache = answer["token_ids"], answer["hybserve"]["cache"]
        return Prompt(path, kind, str(body.get("cache_salt") or ""), [int(token) for token in ids], dict(cache))
    except (KeyError, TypeError, ValueError) as error:
        raise server.strange(f"{route} lacks {error}") from None


def _question(path: Path) -> tuple[str, dict[str, Any], str]:
    """(route, body, what it is). Raises ConfigError."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix == ".json":
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        body = None
    if isinstance(body, dict) and "messages" in body:
        return "/v1/chat/completions/render", body, "chat"
    if isinstance(body, dict) and "prompt" in body:
        return "/v1/completions/render", body, "completion"
    if path.suffix == ".json":
        raise ConfigError(f"{path} is not a request body: it has neither messages nor prompt")
    if not text:
        raise ConfigError(f"{path} is empty")
    return "/v1/completions/render", {"prompt": text}, "text"


def _page_size(server: Server) -> int:
    answer = server.ask("GET", "/v1/models")
    try:
        return int(answer["data"][0]["hybserve"]["page_size"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise server.strange(f"/v1/models lacks {error}") from None


def _difference(server: Server, a: Prompt, b: Prompt, page: int) -> list[str]:
    """Where the token ids part, with the words around."""
    at = _common(a.ids, b.ids)
    if a.ids == b.ids:
        return [f"No difference: the same {at} tokens, {at // page} whole pages of {page}."]
    before = _text(server, a.ids[max(at - CONTEXT, 0) : at])[-WIDTH:]
    return [
        f"First difference: token {at}, in page {at // page} (pages of {page} tokens)",
        f"  before  {before!r}",
        f"  A has   {_from(server, a.ids, at)}",
        f"  B has   {_from(server, b.ids, at)}",
        f"They share {at // page} whole pages, {at // page * page} tokens.",
    ]


def _from(server: Server, ids: list[int], at: int) -> str:
    """The token at a position and a few that follow."""
    if at >= len(ids):
        return "(ends here)"
    after = _text(server, ids[at + 1 : at + 1 + CONTEXT])[:WIDTH]
    return f"{_text(server, ids[at : at + 1])!r} (id {ids[at]}), then {after!r}"


def _reuse(server: Server, b: Prompt) -> list[str]:
    """What B would reuse now, and why not more."""
    try:
        hit, kv, at = (int(b.cache[key]) for key in ("hit", "kv_hit", "at"))
        reason = str(b.cache["reason"])
    except (KeyError, TypeError, ValueError) as error:
        raise server.strange(f"the cache block lacks {error}") from None
    now = f"B would reuse {hit} of its {len(b.ids)} tokens now"
    if hit:
        now += f": the nearest checkpoint stands at {hit}"
    lines = [f"{now} (KV is there up to {kv})."]
    where = f" ({_from(server, b.ids, at)})" if reason == "divergent" else ""
    words = f": {_WORDS[reason]}" if reason in _WORDS else ""
    return [*lines, f"Not deeper: {reason} at {at}{where}{words}."]


def _common(one: list[int], other: list[int]) -> int:
    """How many leading ids are equal."""
    for index, (x, y) in enumerate(zip(one, other, strict=False)):
        if x != y:
            return index
    return min(len(one), len(other))


def _text(server: Server, ids: list[int]) -> str:
    answer = server.ask("POST", "/detokenize", {"tokens": ids})
    try:
        return str(answer["prompt"])
    except (KeyError, TypeError) as error:
        raise server.strange(f"/detokenize lacks {error}") from None
