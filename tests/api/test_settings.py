"""Settings of a deployment, keys by the name of their environment variable."""

import hashlib

import pytest

from hybserve.api.settings import from_deployment
from hybserve.config.deployment import Deployment
from hybserve.core.errors import ConfigError


def test_defaults():
    settings = from_deployment(Deployment.build({}), {})
    assert settings.key_digests == ()
    assert settings.max_body == 64 << 20
    assert settings.request_timeout == 0.0
    assert not settings.allow_request_template


def test_keys_are_kept_as_digests():
    deployment = Deployment.build({"server": {"api_key_env": "KEY", "admin_api_key_env": "ADMIN"}})
    settings = from_deployment(deployment, {"KEY": "sesame\n", "ADMIN": "root"})
    assert settings.key_digests == tuple(hashlib.sha256(key).digest() for key in (b"sesame", b"root"))
    assert "sesame" not in repr(settings)


@pytest.mark.parametrize("environ", [{}, {"KEY": ""}, {"KEY": " "}])
def test_a_named_but_empty_key_is_refused(environ):
    with pytest.raises(ConfigError, match="KEY"):
        from_deployment(Deployment.build({"server": {"api_key_env": "KEY"}}), environ)
