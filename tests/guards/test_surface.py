"""What users can name is frozen here: commands, exported names, routes. A change of these lists is a decision."""

import click

import hybserve
from hybserve.api.routes import Routes
from hybserve.cli import cli

COMMANDS = {"serve", "plan", "config show", "config schema", "config explain", "demo", "explain-miss", "version"}
OPTIONS = {
    "serve": {"file", "sets"},
    "plan": {"file", "sets", "as_json"},
    "config show": {"file", "sets", "origin"},
    "config schema": set(),
    "config explain": {"key"},
    "demo": set(),
    "explain-miss": {"a", "b", "url", "api_key_env"},
    "version": set(),
}
ROUTES = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/render"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name:path}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("POST", "/flush_cache"),
}
PACKAGES = {
    "api", "cache", "config", "core", "embedded", "launch", "layers", "models", "observe", "parallel", "plan", "runner",
    "scheduler", "spec", "text", "wire",
}  # fmt: skip


def commands(group, prefix=""):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def test_commands_and_their_options():
    found = dict(commands(cli))
    assert set(found) == COMMANDS
    for name, options in OPTIONS.items():
        assert {parameter.name for parameter in found[name].params} == options, name


def test_exported_names():
    assert hybserve.__all__ == ["__version__"]


def test_routes():
    routes = Routes.table(Routes.__new__(Routes))
    found = {(method, route.path) for route in routes for method in route.methods - {"HEAD"}}
    assert found == ROUTES


def test_top_level_of_the_house(root):
    found = {path.name for path in (root / "hybserve").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found == PACKAGES
    modules = {path.name for path in (root / "hybserve").glob("*.py")}
    assert modules == {"__init__.py", "__main__.py", "cli.py", "explain.py"}
