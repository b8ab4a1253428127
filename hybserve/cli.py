"""The ``hybserve`` command. Everything heavy is imported inside a command, so that ``--help`` answers at once."""

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from hybserve import __version__
from hybserve.core.errors import EXIT_OK, EXIT_PLAN, HybserveError

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False))
_SET = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one key of the configuration; may be given several times.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="hybserve", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve hybrid language models: full attention beside recurrent layers, planned to the byte."""


@cli.command()
@_FILE
@_SET
def serve(file: str | None, sets: tuple[str, ...]) -> None:
    """Serve the model of FILE (YAML) over HTTP; without a FILE, the small one that comes along."""
    from hybserve.launch.ahead import engine_ahead

    with engine_ahead() as ahead:
        from hybserve.config.load import load_deployment
        from hybserve.launch.serve import serve as run

        code = run(load_deployment(file, sets), ahead)
    sys.exit(code)


@cli.command()
@_FILE
@_SET
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(file: str | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Plan the memory of FILE without loading anything; exit code 3 and the smallest edits if it does not fit."""
    from hybserve.config.load import load_deployment
    from hybserve.launch.prepare import model_directory
    from hybserve.plan.planner import plan_deployment
    from hybserve.plan.report import format_plan, plan_json

    deployment = load_deployment(file, sets)
    result = plan_deployment(deployment, path=model_directory(deployment))
    click.echo(plan_json(result) if as_json else format_plan(result))
    sys.exit(EXIT_OK if result.fits else EXIT_PLAN)


@cli.group()
def config() -> None:
    """Show, describe and explain the configuration."""


@config.command("show")
@_FILE
@_SET
@click.option("--origin", is_flag=True, help="Say where every value comes from.")
def config_show(file: str | None, sets: tuple[str, ...], origin: bool) -> None:
    """Print the effective configuration as YAML."""
    from hybserve.config.describe import show
    from hybserve.config.load import load_deployment

    click.echo(show(load_deployment(file, sets), origin), nl=False)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a configuration file."""
    import json

    from hybserve.config.describe import schema

    click.echo(json.dumps(schema(), indent=2))


@config.command("explain")
@click.argument("key")
def config_explain(key: str) -> None:
    """Say what KEY means, its type, its default and how to set it."""
    from hybserve.config.describe import explain

    click.echo(explain(key))


@cli.command()
def demo() -> None:
    """Serve the embedded model, stream a short conversation, stop."""
    from hybserve.launch.demo import demo as run

    sys.exit(run())


@cli.command("explain-miss")
@click.argument("a", type=click.Path(exists=True, dir_okay=False))
@click.argument("b", type=click.Path(exists=True, dir_okay=False))
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The running server.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key.")
def explain_miss(a: str, b: str, url: str, api_key_env: str | None) -> None:
    """Say where prompts A and B part, and what B would reuse on a running server.

    A and B are files: the JSON body of a request, or plain text.
    """
    import os
    from pathlib import Path

    from hybserve.explain import api_key
    from hybserve.explain import explain_miss as explain

    click.echo(explain(Path(a), Path(b), url, api_key(api_key_env, os.environ)))


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(f"hybserve {__version__}")


def _open_standard_streams() -> None:
    """Those that are closed lead nowhere from here on: else the first sockets would get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))


def main() -> None:
    """Entry point. A refusal is its message on standard error and its exit code, never a traceback."""
    _open_standard_streams()
    try:
        cli()
    except HybserveError as error:
        click.echo(f"hybserve: {error}", err=True)
        sys.exit(error.exit_code)
