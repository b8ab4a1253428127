"""YAML 1.2 scalars, and nothing that surprises: the reader of deployment files.

Plain PyYAML speaks YAML 1.1: it reads ``1e6`` as text, ``12:30`` as 750, ``no`` as False, and keeps the last of two
equal keys. Here ``1e6`` is a number, the other two are text, equal keys are refused, and so are tags, merges and
documents after the first.
"""

import re
from typing import TypeAlias

import msgspec
import yaml
from yaml.scanner import ScannerError

Scalar: TypeAlias = str | int | float | bool | None


class Leaf(msgspec.Struct, frozen=True):
    """One stated value: dotted key, plain value (a scalar or a list of scalars), line from 1."""

    key: str
    value: Scalar | list[Scalar]
    line: int


class Flaw(msgspec.Struct, frozen=True):
    """What is wrong with the text itself."""

    key: str  # "" when it is not about a key
    what: str
    line: int


#: Brackets inside brackets; a deployment needs two.
_DEEPEST = 8


class _Loader(yaml.SafeLoader):
    """SafeLoader's scanner and composer with the resolvers of the YAML 1.2 core schema only."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own protocol

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Refuse deep brackets at once: the scanner takes quadratic time over them."""
        if self.flow_level >= _DEEPEST:
            raise ScannerError(None, None, "nested too deeply", self.get_mark())
        super().fetch_flow_collection_start(token)


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


def read_tree(text: str, sections: frozenset[str]) -> tuple[list[Leaf], list[Flaw]]:
    """All stated values of a document in order, and all flaws. ``sections``: dotted keys whose value is a mapping;
    a mapping anywhere else is a flaw."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return [], [Flaw("", f"not YAML: {error.problem or error.context}", mark.line + 1 if mark else 1)]
    except yaml.YAMLError as error:
        return [], [Flaw("", f"not YAML: {str(error).splitlines()[0]}", 1)]
    except RecursionError:
        return [], [Flaw("", "nested too deeply", 1)]
    if root is None:
        return [], []
    if not isinstance(root, yaml.MappingNode):
        return [], [Flaw("", "expected sections such as `engine:`", _line(root))]
    leaves: list[Leaf] = []
    flaws: list[Flaw] = []
    _walk(root, "", sections, leaves, flaws)
    return leaves, flaws


def read_value(text: str) -> Scalar | list[Scalar]:
    """One value written in a line (``[a, b]`` or a scalar). Raises ValueError."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ValueError(f"not a YAML value: {problem}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return None if node is None else _value(node)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _walk(node: yaml.MappingNode, prefix: str, sections: frozenset[str], leaves: list[Leaf], flaws: list[Flaw]) -> None:
    seen: dict[str, int] = {}
    for name, child in node.value:
        if not isinstance(name, yaml.ScalarNode) or name.tag != _TAG + "str":
            flaws.append(Flaw(prefix, "a key must be text", _line(name)))
            continue
        key = f"{prefix}.{name.value}" if prefix else name.value
        if key in seen:
            flaws.append(Flaw(key, f"stated twice, first in line {seen[key]}", _line(name)))
            continue
        seen[key] = _line(name)
        if key in sections and isinstance(child, yaml.MappingNode):
            _walk(child, key, sections, leaves, flaws)
            continue
        if isinstance(child, yaml.MappingNode) and not prefix:
            leaves.append(Leaf(key, None, _line(name)))  # a section that does not exist: its own name is the error
            continue
        try:
            leaves.append(Leaf(key, _value(child), _line(name)))
        except ValueError as error:
            flaws.append(Flaw(key, str(error), _line(child)))


def _value(node: yaml.Node) -> Scalar | list[Scalar]:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ValueError("expected a list of plain values")
        return [_scalar(item) for item in node.value]
    raise ValueError("expected a value, got a mapping")


def _scalar(node: yaml.ScalarNode) -> Scalar:
    text = str(node.value)
    match node.tag.removeprefix(_TAG):
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        case "float":
            return float(text)
        case tag:
            raise ValueError(f"the tag {tag} is not allowed")
