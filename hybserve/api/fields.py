"""Typed reading of one JSON object: no coercion, ranges with the numbers in the message, unknown keys remembered."""

from typing import Any

import msgspec

from hybserve.core.errors import RequestError, invalid_value


def shown(value: Any) -> str:
    """A value of the client as it may stand in an error message: JSON, short."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return "an integer beyond 64 bits"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    text = msgspec.json.encode(value[:64] if isinstance(value, str) else value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


class Fields:
    """Reads the known keys of ``data``; ``path`` is its JSON path. ``null`` counts as absent."""

    def __init__(self, data: dict[str, Any], path: str = "") -> None:
        self._data = data
        self._path = path
        self._seen: set[str] = set()

    def param(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def get(self, key: str) -> Any:
        self._seen.add(key)
        return self._data.get(key)

    def given(self, key: str) -> bool:
        return self._data.get(key) is not None

    def unread(self) -> list[str]:
        """Keys that nobody asked for."""
        return [key for key in self._data if key not in self._seen]

    def refuse(self, key: str, wanted: str, value: Any) -> RequestError:
        param = self.param(key)
        return invalid_value(f"{param} must be {wanted}, got {shown(value)}.", param)

    def integer(self, key: str, low: int, high: int, default: int) -> int:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, low: float, high: float, default: float, *, open_low: bool = False) -> float:
        value = self.get(key)
        if value is None:
            return default
        good = type(value) in (int, float) and low <= value <= high and not (open_low and value == low)
        if not good:
            edge = "above" if open_low else "from"
            raise self.refuse(key, f"a number {edge} {low:g} {'up ' if open_low else ''}to {high:g}", value)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refuse(key, "true or false", value)
        return value

    def string(self, key: str, *, max_bytes: int | None = None) -> str | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.refuse(key, "a string", value)
        if max_bytes is not None and len(value.encode()) > max_bytes:
            param = self.param(key)
            raise invalid_value(f"{param} must be at most {max_bytes} bytes long.", param)
        return value

    def object(self, key: str) -> dict[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "an object", value)
        return value

    def array(self, key: str, limit: int) -> list[Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse(key, "an array", value)
        if len(value) > limit:
            param = self.param(key)
            raise invalid_value(f"{param} must have at most {limit} entries, got {len(value)}.", param)
        return value
