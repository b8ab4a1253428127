"""Errors as HTTP: the refusals that only the HTTP front knows, and the one body shape on the wire.

``{"error": {"message", "type", "param", "code"}}``; no exception class, path or address ever stands in it.
"""

from collections.abc import Iterable

import msgspec

from hybserve.core.errors import ErrorBody, RequestError

INVALID = "invalid_request_error"

#: What /v1 clients ask for that this server does not have, and the sentence they get.
ABSENT_ROUTES = {
    "/v1/embeddings": "This server generates text only; it does not serve embeddings.",
    "/v1/responses": "The responses API is not served; use /v1/chat/completions.",
    "/v1/messages": "The messages API is not served; use /v1/chat/completions.",
    "/v1/messages/count_tokens": "The messages API is not served; use /tokenize to count tokens.",
}
SERVED = (
    "/v1/chat/completions, /v1/completions (both with /render), /v1/models, /tokenize, /detokenize, /health, "
    "/health/ready, /metrics, /version and /flush_cache"
)


def _refusal(status: int, code: str, message: str, param: str | None = None) -> RequestError:
    return RequestError(ErrorBody(message, INVALID, code, param, status))


def route_not_found(path: str) -> RequestError:
    message = ABSENT_ROUTES.get(path, f"There is no such route. This server serves {SERVED}.")
    return _refusal(404, "not_found", message)


def method_not_allowed(method: str, allowed: str) -> RequestError:
    return _refusal(405, "method_not_allowed", f"The method {method[:16]} is not allowed here; use {allowed}.")


def bad_request(message: str) -> RequestError:
    return _refusal(400, "invalid_value", message)


def body_too_large(limit: int) -> RequestError:
    return _refusal(413, "body_too_large", f"The request body is larger than {limit} bytes (server.max_body).")


def url_too_long(limit: int) -> RequestError:
    return _refusal(414, "url_too_long", f"The request target is longer than {limit} bytes.")


def headers_too_large(limit: int) -> RequestError:
    return _refusal(431, "headers_too_large", f"The request headers are larger than {limit} bytes or too many.")


def encoding_unsupported() -> RequestError:
    return _refusal(415, "unsupported_encoding", "Content-Encoding is not supported; send the body uncompressed.")


def too_slow(seconds: float) -> RequestError:
    return _refusal(408, "request_timeout", f"The request was not received within {seconds:g} seconds.")


def invalid_api_key() -> RequestError:
    message = "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
    return RequestError(ErrorBody(message, "authentication_error", "invalid_api_key", None, 401))


def admin_only() -> RequestError:
    message = "This route needs the admin key (server.admin_api_key_env names the variable that holds it)."
    return RequestError(ErrorBody(message, "permission_error", "permission_denied", None, 403))


def too_many_connections() -> RequestError:
    message = "The server has as many connections as it can serve; try again shortly."
    return RequestError(ErrorBody(message, "server_error", "queue_full", None, 503, 1))


def too_many_bodies() -> RequestError:
    message = "The server is receiving as much request data as it can hold; try again shortly."
    return RequestError(ErrorBody(message, "server_error", "queue_full", None, 503, 1))


def internal() -> RequestError:
    message = "The server failed on this request; the cause is in its log."
    return RequestError(ErrorBody(message, "server_error", "engine_error", None, 500))


def error_json(body: ErrorBody) -> bytes:
    error = {"message": body.message, "type": body.type, "param": body.param, "code": body.code}
    return msgspec.json.encode({"error": error})


def error_headers(body: ErrorBody) -> list[tuple[bytes, bytes]]:
    """Headers that belong to an error: Retry-After, and the challenge of a 401."""
    headers: list[tuple[bytes, bytes]] = []
    if body.retry_after:
        headers.append((b"retry-after", str(body.retry_after).encode()))
    if body.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def header_value(words: Iterable[str]) -> bytes:
    """Words of the client as one safe header value: printable ASCII without commas, at most 32 words of 64."""
    safe = []
    for word in list(words)[:32]:
        kept = "".join(c if c.isascii() and c.isprintable() and c not in ',"' else "?" for c in word[:64])
        safe.append(kept)
    return ", ".join(safe).encode("ascii")
