"""The set of configuration keys, read off the sections of Deployment."""

from collections.abc import Iterator
from typing import get_args

from pydantic.fields import FieldInfo

from hybserve.config.deployment import Deployment, Section


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo | None]]:
    """Every dotted key with its field; a section itself with None."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield key, None
            yield from _walk(field.annotation, f"{key}.")
        else:
            yield key, field


_ALL = dict(_walk(Deployment, ""))

#: Dotted key -> pydantic field, in the order of the sections.
KEYS: dict[str, FieldInfo] = {key: field for key, field in _ALL.items() if field is not None}
#: Dotted keys that hold other keys.
SECTIONS: frozenset[str] = frozenset(key for key, field in _ALL.items() if field is None)


def is_text(key: str) -> bool:
    """Whether the key takes any text, so that what stands in an environment variable needs no quotes."""
    field = KEYS.get(key)
    return field is not None and (field.annotation is str or set(get_args(field.annotation)) == {str, type(None)})
