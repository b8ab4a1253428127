"""What the HTTP front needs of the deployment, with every limit and deadline as a number a test can shrink.

Sizes are bytes, times are seconds.
"""

import hashlib
import os
import resource
from collections.abc import Mapping

import msgspec

from hybserve.config.deployment import SILENCE, Deployment, is_loopback
from hybserve.core.errors import ConfigError

#: File descriptors kept free for links, logs and the listening socket.
SPARE_DESCRIPTORS = 128
MAX_CONNECTIONS = 4096


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the HTTP front. ``key_digests`` are SHA-256 digests of the accepted API keys; empty = open server.

    ``admin_digests`` are those of them that open the admin routes too. Without any key these routes are open if
    ``loopback``: the server listens only where this host can reach it.
    """

    key_digests: tuple[bytes, ...] = ()
    admin_digests: tuple[bytes, ...] = ()
    loopback: bool = False
    max_body: int = 64 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_headers: int = 256
    max_url: int = 8 * 2**10
    max_connections: int = MAX_CONNECTIONS
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    #: After an early refusal the rest of the request is read and dropped this long, so that the client sees the answer.
    linger: float = 1.0
    keep_alive: int = 30
    drain_timeout: float = 30.0
    request_timeout: float = 0.0
    sse_ping: float = 10.0
    #: Without a heartbeat of the engine for this long the server calls itself unhealthy.
    stall_timeout: float = SILENCE["cpu"]
    allow_request_template: bool = False


def _key_digest(variable: str, environ: Mapping[str, str]) -> bytes:
    key = environ.get(variable, "")
    if not key.strip():
        raise ConfigError(f"The environment variable {variable} is named as the holder of an API key but is empty.")
    return hashlib.sha256(os.fsencode(key.strip())).digest()


def _digests(variable: str | None, environ: Mapping[str, str]) -> tuple[bytes, ...]:
    return (_key_digest(variable, environ),) if variable else ()


def _connection_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = MAX_CONNECTIONS
    return ceiling if soft == resource.RLIM_INFINITY else max(16, min(ceiling, soft - SPARE_DESCRIPTORS))


def from_deployment(deployment: Deployment, environ: Mapping[str, str] = os.environ) -> ApiSettings:
    """Settings of one deployment. Raises ConfigError when a named key variable is empty."""
    server = deployment.server
    users, admins = (_digests(name, environ) for name in (server.api_key_env, server.admin_api_key_env))
    return ApiSettings(
        key_digests=users + admins,
        admin_digests=admins,
        loopback=is_loopback(server.host),
        max_body=server.max_body,
        max_connections=_connection_limit(),
        drain_timeout=server.drain_timeout,
        request_timeout=server.request_timeout or 0.0,
        sse_ping=server.sse_ping,
        stall_timeout=SILENCE["cuda" if deployment.engine.backend == "cuda" else "cpu"],
        allow_request_template=deployment.text.allow_request_template,
    )
