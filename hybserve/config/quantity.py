"""Field types with units: what a person may write (``64K``, ``8GiB``, ``30s``, ``auto``) and what the code then reads.

A quantity is an ``int`` (counts, bytes) or a ``float`` (seconds). Where ``auto`` is allowed it reads as ``None``. Every
refusal names the limit in the unit the person wrote.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from hybserve.core.units import GIB, KIB, MIB, parse_bytes, parse_count, parse_seconds


def _seconds_text(value: float) -> str:
    return f"{int(value)}s" if float(value).is_integer() else f"{value}s"


def _exact(units: tuple[tuple[str, int], ...]) -> Callable[[int], str]:
    """The shortest form that parses back to the same number."""

    def text(value: int) -> str:
        for unit, size in units:
            if value >= size and value % size == 0:
                return f"{value // size}{unit}"
        return str(value)

    return text


@dataclass(frozen=True)
class Unit:
    words: str  # "a count", as in error messages and explanations
    example: str
    pattern: str  # of the written form, for the JSON schema
    parse: Callable[[object], float]
    text: Callable[[Any], str]  # exact: parses back to the same number


COUNT = Unit(
    "a count", "64K", r"^[0-9]+(\.[0-9]+)?[KMGkmg]?$", parse_count, _exact((("G", GIB), ("M", MIB), ("K", KIB)))
)
BYTES = Unit(
    "a size in bytes",
    "8GiB",
    r"^[0-9]+(\.[0-9]+)? ?([KMGTkmgt][iI]?)?[bB]?$",
    parse_bytes,
    _exact((("GiB", GIB), ("MiB", MIB), ("KiB", KIB))),
)
SECONDS = Unit("a duration", "30s", r"^[0-9]+(\.[0-9]+)? ?(ms|s|m|min|h|d)?$", parse_seconds, _seconds_text)
INTEGER = Unit("a whole number", "0", r"^[0-9]+$", parse_count, str)


@dataclass(frozen=True)
class Quantity:
    """Metadata of a pydantic field (``Annotated[int, Quantity(BYTES, low=1)]``): parses, checks, describes."""

    unit: Unit
    low: float = 0
    high: float | None = None
    auto: bool = False

    @property
    def limits(self) -> str:
        low = self.unit.text(self.low)
        return f"at least {low}" if self.high is None else f"between {low} and {self.unit.text(self.high)}"

    @property
    def words(self) -> str:
        """The type in words, for ``config explain``."""
        tail = ", or auto" if self.auto else ""
        return f"{self.unit.words} such as {self.unit.example}, {self.limits}{tail}"

    def parse(self, value: object) -> float | None:
        """The number meant by what was written; None for ``auto``. Raises ValueError."""
        if self.auto and (value is None or value == "auto"):
            return None
        number = self._number(value)
        if number < self.low or (self.high is not None and number > self.high):
            raise ValueError(f"must be {self.limits}, got {value}")
        return number

    def _number(self, value: object) -> float:
        if isinstance(value, float) and value.is_integer():  # `1e6`
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value  # exact, unlike anything that went through a float
        return self.unit.parse(value)

    def show(self, value: float | None) -> str:
        """As a person would write it; parses back to the same value."""
        return "auto" if value is None else self.unit.text(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.parse, serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        number: JsonSchemaValue = {"type": "number" if self.unit is SECONDS else "integer", "minimum": self.low}
        if self.high is not None:
            number["maximum"] = self.high
        forms: list[JsonSchemaValue] = [number, {"type": "string", "pattern": self.unit.pattern}]
        return {"anyOf": [*forms, {"const": "auto"}] if self.auto else forms}
