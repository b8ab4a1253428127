"""What ``hybserve config show | schema | explain`` print."""

import json
from typing import Any, get_args

from pydantic.fields import FieldInfo

from hybserve.config.deployment import NOT_YET, Deployment
from hybserve.config.keys import KEYS, SECTIONS
from hybserve.config.load import ENV_PREFIX, did_you_mean
from hybserve.config.quantity import Quantity
from hybserve.config.strict_yaml import read_value
from hybserve.core.errors import ConfigError


def show(deployment: Deployment, origin: bool = False) -> str:
    """The whole deployment as YAML that loads again; with ``origin`` every line says where its value comes from. Keys
    that are not set stand as comments."""
    lines: list[str] = []
    path: list[str] = []
    for key in KEYS:
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if path[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        path = sections
        value = deployment.value(key)
        written = _written(KEYS[key], value)
        line = f"{'  ' * len(sections)}{name}: {written}" if written else f"{'  ' * len(sections)}# {name} is not set"
        lines.append(f"{line:<44}  # {deployment.origin(key)}" if origin else line)
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema of a deployment file, for editors. Defaults are as written: ``auto``, or absent when not set."""
    whole = Deployment.model_json_schema()
    for section in whole["$defs"].values():
        for name, rule in section["properties"].items():
            if rule.get("default", "") is None:
                del rule["default"]
                if {"const": "auto"} in rule["anyOf"]:
                    section["properties"][name]["default"] = "auto"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def explain(key: str) -> str:
    """What a key means: type, default, meaning, how to set it; for a section, its keys. Raises ConfigError."""
    if key in SECTIONS:
        return "\n".join(f"{known}: {KEYS[known].description}" for known in KEYS if known.startswith(f"{key}."))
    if key not in KEYS:
        raise ConfigError(f"{key}: unknown key{did_you_mean(key)}")
    field = KEYS[key]
    variable = ENV_PREFIX + key.upper().replace(".", "__")
    lines = [
        key,
        f"  meaning  {field.description}",
        f"  type     {_type_words(field)}",
        f"  default  {_written(field, field.default) or 'not set'}",
        f"  set by   --set {key}=VALUE, {variable}=VALUE, or the file",
    ]
    if key in NOT_YET:
        lines.append("  note     not available yet: only the default is accepted")
    return "\n".join(lines)


def _quantity(field: FieldInfo) -> Quantity | None:
    return next((meta for meta in field.metadata if isinstance(meta, Quantity)), None)


def _type_words(field: FieldInfo) -> str:
    quantity = _quantity(field)
    if quantity is not None:
        return quantity.words
    if field.annotation is bool:
        return "true or false"
    if isinstance(field.default, tuple):
        return "a name or a list of names"
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
    return "one of " + ", ".join(choices) if choices else "text"


def _written(field: FieldInfo, value: Any) -> str:
    """A value as YAML; empty when it is not set."""
    quantity = _quantity(field)
    if quantity is not None:
        return quantity.show(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(json.dumps(name, ensure_ascii=False) for name in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else _text(value)


def _text(value: str) -> str:
    try:
        plain = read_value(value) == value
    except ValueError:
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)
