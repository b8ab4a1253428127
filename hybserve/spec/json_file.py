"""JSON files of a model directory, read as what they are: foreign bytes.

Size is capped before reading, nesting and number length are caught, ``NaN`` and ``Infinity`` are refused. All errors
are a one-line ModelError that names the file.
"""

import json
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybserve.core.errors import ModelError
from hybserve.core.units import MIB, format_bytes

#: Most bytes that are read of each file. Public ones stay well below (the largest tokenizer.json is about 30 MiB).
CONFIG_LIMIT = 4 * MIB
TOKENIZER_LIMIT = 256 * MIB


def read_object(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ModelError, also if the file is missing or longer than ``limit`` bytes."""
    return parse_object(read_capped(path, limit), path.name)


def read_optional(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any] | None:
    """As ``read_object``; None if there is no such file."""
    return read_object(path, limit) if path.exists() else None


def read_capped(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes. Raises ModelError."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise ModelError(f"{path.name}: not a regular file")
        if facts.st_size > limit:
            raise ModelError(f"{path.name}: {format_bytes(facts.st_size)}, the limit is {format_bytes(limit)}")
        with path.open("rb") as file:
            return file.read(limit)
    except FileNotFoundError:
        raise ModelError(f"{path.name}: not found in {str(path.parent)!r}") from None
    except OSError as error:
        raise ModelError(f"{path.name}: cannot be read ({error.strerror})") from None


def parse_object(raw: bytes, name: str, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in ``raw``; with ``unique`` a repeated key is an error. Raises ModelError under ``name``."""
    try:
        content = json.loads(
            raw.decode("utf-8"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_pairs if unique else None,
        )
    except RecursionError:
        raise ModelError(f"{name}: nested too deeply") from None
    except ValueError as error:  # bad UTF-8, bad JSON, a number with thousands of digits
        raise ModelError(f"{name}: not valid JSON ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise ModelError(f"{name}: expected a JSON object, got {_kind(content)}")
    return content


def one_line(value: object, limit: int = 120) -> str:
    """``value`` as text for an error message: one printable line of at most ``limit`` characters."""
    text = "".join(char if char.isprintable() else "?" for char in str(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(value: object) -> str:
    """A foreign value as it may stand in an error message: its repr, shortened before it grows long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a number of more than 70 digits"
    if isinstance(value, (dict, list)):
        return _kind(value)
    return one_line(repr(value[:200] if isinstance(value, str) else value), 80)


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a list of {len(value)}"
    return shown(value)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(repeated)} occurs twice")
    return content
