"""API keys: default-deny on the path the router will see, compared in constant time, never logged.

``/health*`` is open; ``/metrics`` is open to this host. Every other path, existing or not, needs a key when keys are
configured. Admin paths need the admin key; with no key configured at all they are open where only this host can reach
the server. The tenant of a request is a digest of its key, and keys the prefix cache.
"""

import hashlib
import hmac
import ipaddress

from hybserve.api.errors import admin_only, invalid_api_key
from hybserve.api.exchange import Scope, header
from hybserve.api.settings import ApiSettings

OPEN_PATHS = frozenset({"/health", "/health/ready"})
LOCAL_PATHS = frozenset({"/metrics"})
ADMIN_PATHS = frozenset({"/flush_cache"})


def authorise(scope: Scope, settings: ApiSettings) -> str:
    """The tenant of a request; "" on an open server or path. Raises RequestError (401, 403)."""
    path = scope["path"]
    if path in OPEN_PATHS or (path in LOCAL_PATHS and _is_local(scope)):
        return ""
    if not settings.key_digests:
        if path in ADMIN_PATHS and not settings.loopback:
            raise admin_only()
        return ""
    digest = _known_key(scope, settings.key_digests)
    if path in ADMIN_PATHS and digest not in settings.admin_digests:
        raise admin_only()
    return hashlib.sha256(b"tenant:" + digest).hexdigest()[:32]


def _known_key(scope: Scope, digests: tuple[bytes, ...]) -> bytes:
    """The digest of the request's key, which is one of ``digests``. Raises RequestError (401)."""
    values = header(scope, b"authorization")
    if len(values) != 1:
        raise invalid_api_key()
    scheme, _, key = values[0].partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise invalid_api_key()
    digest = hashlib.sha256(key.strip()).digest()
    known = [hmac.compare_digest(digest, one) for one in digests]
    if not any(known):
        raise invalid_api_key()
    return digest


def _is_local(scope: Scope) -> bool:
    """Whether the peer is this host, and not a proxy on this host that speaks for another."""
    if header(scope, b"x-forwarded-for") or header(scope, b"forwarded"):
        return False
    client = scope.get("client")
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
