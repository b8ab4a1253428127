"""Every error that a client or an operator can meet, drawn as one tree.

    HybserveError
    ├── ConfigError     exit 2   usage or configuration
    ├── PlanError       exit 3   the plan does not fit
    ├── ModelError      exit 4   weights, config.json or tokenizer refused
    └── RequestError             one request: HTTP status, type, code, param (the wire body)

``ErrorBody`` is the form in which a RequestError crosses roles and reaches the client. Messages name the key, the
limit and what to do; never an exception class, a path or an address.
"""

import msgspec

EXIT_OK, EXIT_FATAL, EXIT_USAGE, EXIT_PLAN, EXIT_MODEL = 0, 1, 2, 3, 4


class ErrorBody(msgspec.Struct, frozen=True):
    """The one shape of an error on every hop. ``status`` is the HTTP code, ``retry_after`` in seconds (0 = none)."""

    message: str
    type: str
    code: str
    param: str | None = None
    status: int = 400
    retry_after: int = 0


class HybserveError(Exception):
    exit_code = EXIT_FATAL


class ConfigError(HybserveError):
    exit_code = EXIT_USAGE


class PlanError(HybserveError):
    exit_code = EXIT_PLAN


class ModelError(HybserveError):
    exit_code = EXIT_MODEL


class RequestError(HybserveError):
    """A refusal or failure of one request; raise with one of the constructors below."""

    def __init__(self, body: ErrorBody) -> None:
        super().__init__(body.message)
        self.body = body


def invalid_value(message: str, param: str | None = None) -> RequestError:
    return RequestError(ErrorBody(message, "invalid_request_error", "invalid_value", param, 400))


def unsupported_parameter(message: str, param: str | None = None) -> RequestError:
    return RequestError(ErrorBody(message, "invalid_request_error", "unsupported_parameter", param, 400))


def context_length_exceeded(limit: int, prompt: int, requested: int) -> RequestError:
    message = (
        f"This model's maximum context length is {limit} tokens; the prompt has {prompt} and max_tokens asks for "
        f"{requested} more ({prompt + requested} in all). Shorten the prompt or lower max_tokens."
    )
    return RequestError(ErrorBody(message, "invalid_request_error", "context_length_exceeded", "max_tokens", 400))


def exceeds_capacity(message: str, param: str | None = None) -> RequestError:
    return RequestError(ErrorBody(message, "invalid_request_error", "exceeds_capacity", param, 400))


def model_not_found(name: str, served: list[str]) -> RequestError:
    message = f"The model {name!r} does not exist; this server serves {', '.join(served)}."
    return RequestError(ErrorBody(message, "invalid_request_error", "model_not_found", "model", 404))


def queue_full(message: str, retry_after: int = 1) -> RequestError:
    return RequestError(ErrorBody(message, "server_error", "queue_full", None, 503, retry_after))


def unavailable(code: str, message: str, retry_after: int = 5) -> RequestError:
    """503 with code ``model_loading``, ``draining`` or ``engine_unhealthy``."""
    return RequestError(ErrorBody(message, "server_error", code, None, 503, retry_after))


def numerical_error(message: str) -> RequestError:
    return RequestError(ErrorBody(message, "server_error", "numerical_error", None, 500))


def engine_error(message: str) -> RequestError:
    return RequestError(ErrorBody(message, "server_error", "engine_error", None, 500))


def deadline_exceeded(message: str) -> RequestError:
    return RequestError(ErrorBody(message, "server_error", "timeout", None, 504))
