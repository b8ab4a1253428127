"""From what was written to a Deployment: file, environment and ``--set``, with every error at once.

Precedence: ``--set section.key=value`` > environment ``HYBSERVE__SECTION__KEY`` > file > default. Errors read
``where: key: what; did you mean …`` with ``where`` = ``file:line``, the variable or ``--set``.
"""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hybserve.config.deployment import Deployment
from hybserve.config.keys import KEYS, SECTIONS, is_text
from hybserve.config.strict_yaml import Scalar, read_tree, read_value
from hybserve.core.errors import ConfigError

ENV_PREFIX = "HYBSERVE__"


class _Stated(NamedTuple):
    key: str
    value: Scalar | list[Scalar]
    where: str


def load_deployment(
    path: str | os.PathLike[str] | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Deployment:
    """The deployment of a file (none = all defaults), environment (default: the process's) and ``section.key=value``
    overrides. Raises ConfigError with every problem, one a line."""
    problems: list[str] = []
    stated: dict[str, _Stated] = {}
    entries = [
        *_from_file(path, problems),
        *_from_environ(os.environ if environ is None else environ, problems),
        *_from_sets(sets, problems),
    ]
    for entry in entries:
        what = _unusable(entry)
        if what is None:
            stated[entry.key] = entry
        elif what:
            problems.append(f"{entry.where}: {entry.key}: {what}")
    deployment = _validated(stated, problems)
    if problems or deployment is None:
        raise ConfigError("\n".join(sorted(problems, key=lambda text: _line(text, path))))
    return deployment


def _line(problem: str, path: object) -> float:
    """The line of the file that a problem names; infinite for what was stated elsewhere."""
    line = problem.removeprefix(f"{path}:").partition(":")[0]
    return int(line) if line.isdigit() else float("inf")


def _from_file(path: str | os.PathLike[str] | None, problems: list[str]) -> list[_Stated]:
    if path is None:
        return []
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        problems.append(f"{path}: {error.strerror or 'cannot be read'}")
        return []
    except UnicodeDecodeError as error:
        problems.append(f"{path}: not UTF-8 (byte {error.start})")
        return []
    leaves, flaws = read_tree(text, SECTIONS)
    for flaw in flaws:
        problems.append(f"{path}:{flaw.line}: {flaw.key + ': ' if flaw.key else ''}{flaw.what}")
    return [_Stated(leaf.key, leaf.value, f"{path}:{leaf.line}") for leaf in leaves]


def _from_environ(environ: Mapping[str, str], problems: list[str]) -> list[_Stated]:
    names = sorted(name for name in environ if name.startswith(ENV_PREFIX))
    pairs = [(name.removeprefix(ENV_PREFIX).lower().replace("__", "."), environ[name], name) for name in names]
    return _from_lines(pairs, problems)


def _from_sets(sets: Sequence[str], problems: list[str]) -> list[_Stated]:
    pairs = []
    for text in sets:
        key, equals, value = text.partition("=")
        if equals:
            pairs.append((key.strip(), value, "--set"))
        else:
            problems.append(f"--set: {text}: expected section.key=value")
    return _from_lines(pairs, problems)


def _from_lines(lines: Iterable[tuple[str, str, str]], problems: list[str]) -> list[_Stated]:
    entries = []
    for key, text, where in lines:
        try:
            entries.append(_Stated(key, text if is_text(key) else read_value(text), where))
        except ValueError as error:
            problems.append(f"{where}: {key}: {error}")
    return entries


def _unusable(entry: _Stated) -> str | None:
    """Why an entry cannot be used: "" when it says nothing (an empty section), None when it can be used."""
    if entry.key in SECTIONS:
        return "" if entry.value is None else "is a section; write its keys below it"
    if entry.key not in KEYS:
        return "unknown key" + did_you_mean(entry.key)
    if entry.value is None:
        return "has no value; write one or remove the line"
    return None


def did_you_mean(key: str) -> str:
    """``; did you mean a.b`` for a key that does not exist, or nothing: the same name in another section first, then
    the nearest name in its own section, then anywhere."""
    section, _, name = key.rpartition(".")
    own = [known for known in KEYS if known.rpartition(".")[0] == section]
    elsewhere = [known for known in KEYS if known.rpartition(".")[2] == (name or key)]
    near = (
        difflib.get_close_matches(key, own, 1, 0.75) or elsewhere[:1] or difflib.get_close_matches(key, KEYS, 1, 0.75)
    )
    if not near and not section:
        near = difflib.get_close_matches(key, SECTIONS, 1, 0.6)
    return f"; did you mean {near[0]}" if near else ""


def _validated(stated: dict[str, _Stated], problems: list[str]) -> Deployment | None:
    """Validate, and once more without the keys that failed, so that conflicts among the good ones are told as well."""
    good = dict(stated)
    for _ in range(2):
        origins = {key: entry.where for key, entry in good.items()}
        try:
            return Deployment.build(_nested(good.values()), origins)
        except ValidationError as error:
            for key, what in _explained(error):
                problems.append(f"{origins[key]}: {key}: {what}" if key in origins else f"{key}: {what}")
                good.pop(key, None)
    return None


def _nested(entries: Iterable[_Stated]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for entry in entries:
        *sections, name = entry.key.split(".")
        at = values
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = entry.value
    return values


def _explained(error: ValidationError) -> list[tuple[str, str]]:
    found: dict[str, str] = {}  # one problem a key
    for detail in error.errors(include_url=False):
        if detail["type"] == "conflict":
            for key, what in detail["ctx"]["problems"]:
                found.setdefault(key, what)
        else:
            parts = [str(part) for part in detail["loc"] if not isinstance(part, int)]
            found.setdefault(".".join(parts), _words(detail))
    return list(found.items())


def _words(detail: ErrorDetails) -> str:
    given = detail["input"]
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"])
        case "literal_error":
            expected = str(detail["ctx"]["expected"]).replace("'", "")
            near = difflib.get_close_matches(str(given), expected.replace(" or ", ", ").split(", "), 1)
            return f"must be {expected}, got {given!r}" + (f"; did you mean {near[0]}" if near else "")
        case "bool_type":
            return f"must be true or false, got {given!r}"
        case "string_type":
            return f"must be text, got {given!r}; put it in quotes"
        case "string_pattern_mismatch":  # never repeat what may be a secret
            return "must be the name of an environment variable, not the key itself"
        case "string_too_short":
            return "must not be empty"
        case _:
            return detail["msg"]


def check_servable(deployment: Deployment, environ: Mapping[str, str] | None = None) -> None:
    """Refuse what can be planned but not served yet, and API keys that are not there. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    engine, problems = deployment.engine, []
    for key, can in (
        ("engine.tensor_parallel", engine.tensor_parallel == 1),
        ("engine.pipeline_parallel", engine.pipeline_parallel == 1),
        ("memory.kv_dtype", deployment.memory.kv_dtype != "float8_e4m3fn"),
    ):
        if not can:
            problems.append((key, f"{deployment.value(key)} can be planned but not served yet"))
    for key in ("server.api_key_env", "server.admin_api_key_env"):
        name = deployment.value(key)
        if name is not None and not environ.get(name):
            problems.append((key, f"the environment variable {name} is {'empty' if name in environ else 'not set'}"))
    if problems:
        raise ConfigError("\n".join(f"{deployment.origin(key)}: {key}: {what}" for key, what in problems))
