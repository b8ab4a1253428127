"""Request bodies as strict JSON: UTF-8 only, one object, no key twice, finite numbers, bounded depth, no surrogates.

The standard library's parser is lenient (NaN, 1e999, lone surrogates, the last of two equal keys); each leniency is
closed here and reported with the JSON path of the culprit.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from hybserve.core.errors import RequestError, invalid_value

MAX_DEPTH = 64
#: Objects and lists in one body; the longest conversation that is taken has far fewer.
MAX_CONTAINERS = 250_000

#: Strings whole, so that brackets in them do not count; possessive, so that no text makes it slow.
_TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


class _DuplicateError(Exception):
    """Carries the name of a key that stands twice in one object."""


class _NonFiniteError(Exception):
    """A number that is NaN or infinite; where it stands is looked up afterwards."""


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateError(key)
            seen.add(key)
    return found


def _parse_int(literal: str) -> int | float:
    """``-0`` is no integer of ours: as a float it is refused wherever an integer is wanted."""
    return -0.0 if literal == "-0" else int(literal)


def _parse_float(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise _NonFiniteError
    return value


def _parse_constant(literal: str) -> float:
    raise _NonFiniteError


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_object, parse_float=_parse_float, parse_constant=_parse_constant)
_CAREFUL_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_object, parse_float=_parse_float, parse_constant=_parse_constant, parse_int=_parse_int
)


def _refuse_deep(text: str) -> None:
    """Nesting and number of containers, before anything is built of them."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = opened = 0
    for match in _TOKENS.finditer(text):
        token = match.group()
        if token in "[{":
            depth += 1
            opened += 1
            if opened > MAX_CONTAINERS:
                raise invalid_value(f"The body has more than {MAX_CONTAINERS} objects and lists.")
            if depth > MAX_DEPTH:
                raise invalid_value(f"The body is nested deeper than {MAX_DEPTH} levels.")
        elif token in "]}":
            depth -= 1


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every scalar and every key of a parsed body with its JSON path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def printable(path: str) -> str:
    """A JSON path fit for an error body: no lone surrogates, bounded."""
    return path.encode("utf-8", "replace").decode()[:200]


def _refuse_surrogates(body: Any) -> None:
    for path, value in _leaves(body, ""):
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                name = printable(path) or "the body"
                raise invalid_value(
                    f"{name} holds half of a surrogate pair at character {error.start}.", printable(path) or None
                ) from None


def _non_finite(text: str) -> RequestError:
    """The error that names the first NaN or infinity of a body."""
    try:
        body = json.loads(text)
    except ValueError:  # something else is wrong with it, too
        return invalid_value("The body is not valid JSON: a number is not finite.")
    for path, value in _leaves(body, ""):
        if isinstance(value, float) and not math.isfinite(value):
            name = printable(path) or "the body"
            return invalid_value(f"{name} must be a finite number.", printable(path) or None)
    return invalid_value("Numbers must be finite.")


def _decode(text: str) -> Any:
    decoder = _CAREFUL_DECODER if "-0" in text else _DECODER
    try:
        return decoder.decode(text)
    except _DuplicateError as error:
        name = printable(str(error))
        raise invalid_value(f"The key {name!r} stands twice in one object.", name) from None
    except _NonFiniteError:
        raise _non_finite(text) from None
    except RecursionError:
        raise invalid_value(f"The body is nested deeper than {MAX_DEPTH} levels.") from None
    except json.JSONDecodeError as error:
        raise invalid_value(
            f"The body is not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos}."
        ) from None
    except ValueError:
        raise invalid_value("The body is not valid JSON: an integer has too many digits.") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """The one JSON object of a request body. Raises RequestError (400)."""
    body = _parse(raw)
    if not isinstance(body, dict):
        raise invalid_value("The body must be a JSON object.")
    return body


def _parse(raw: bytes) -> Any:
    if not raw.strip():
        raise invalid_value("The body is empty; a JSON object is expected.")
    text = _text(raw)
    _refuse_deep(text)
    body = _decode(text)
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates(body)
    return body


def _text(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error.start) from None
    if text.startswith("\ufeff"):
        raise invalid_value("The body begins with a byte order mark; send plain UTF-8.")
    return text


def _not_utf8(offset: int) -> RequestError:
    return invalid_value(f"The body is not valid UTF-8 at byte {offset}.")
