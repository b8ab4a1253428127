"""Human units: bytes, token counts, durations and percentages, both ways.

Binary suffixes are powers of 1024 (``8GiB``), a bare ``K``/``M``/``G`` counts tokens in powers of 1024
(``64K`` = 65 536 tokens), decimal byte suffixes (``8GB``) are powers of 1000.
"""

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]*)\s*\Z")
_BYTES = {
    "": 1, "B": 1,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024**4,
    "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
}  # fmt: skip
_COUNT = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_SECONDS = {"": 1.0, "S": 1.0, "MS": 1e-3, "M": 60.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}


def _parse(value: object, table: dict[str, float] | dict[str, int], kind: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"expected {kind} such as {example}, got {value!r}")
    match = _NUMBER.match(str(value))
    if match is None or match.group(2).upper() not in table:
        raise ValueError(f"expected {kind} such as {example}, got {value!r}")
    return float(match.group(1)) * table[match.group(2).upper()]


def _whole(value: float, raw: object) -> int:
    if value != int(value):
        raise ValueError(f"{raw!r} is not a whole number")
    return int(value)


def parse_bytes(value: object) -> int:
    """``8GiB``, ``512MB`` or a plain number of bytes, as an int. Raises ValueError."""
    return _whole(_parse(value, _BYTES, "a size in bytes", "8GiB"), value)


def parse_count(value: object) -> int:
    """``64K`` (65 536) or a plain count, as an int. Raises ValueError."""
    return _whole(_parse(value, _COUNT, "a count", "64K"), value)


def parse_seconds(value: object) -> float:
    """``30s``, ``500ms``, ``2m`` or plain seconds, as a float of seconds. Raises ValueError."""
    return _parse(value, _SECONDS, "a duration", "30s")


def parse_fraction(value: object) -> float:
    """``90%`` or ``0.9``, as a float in [0, 1]. Raises ValueError."""
    fraction = _parse(value, {"": 1.0, "%": 0.01}, "a share", "90%")
    if fraction > 1:
        raise ValueError(f"a share cannot exceed 100%, got {value!r}")
    return fraction


def format_bytes(count: int) -> str:
    """A size with the largest binary unit that keeps at least one digit before the point."""
    for unit, size in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}" if count % size else f"{count // size} {unit}"
    return f"{count} B"


def format_count(count: int) -> str:
    """A token count: ``64K`` where it divides evenly, with spaced thousands otherwise."""
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}".replace(",", " ")
