"""No name is defined in the product and used nowhere but in tests. Compares names, not objects: a lint, not a proof."""

import ast
from collections import Counter

#: Used from outside: entry points, hooks of libraries, and names that tests need on purpose.
ALLOWED = {
    "main",  # entry points
    "padding_intact",  # the canary of page 0 and slot 0, looked at by tests and the parity bench
    "parse_fraction",  # completes the units of the configuration
}


def test_every_name_is_used(sources):
    uses = Counter()
    for source in sources:
        uses.update(_used_names(source.tree, source.path.name == "__init__.py"))
    unused = [
        f"{source.path}:{line}: {name}"
        for source in sources
        if source.path.name != "reference.py"  # the specification of an operation is for tests as well
        for name, line in _defined_names(source.tree)
        if not uses[name] and name not in ALLOWED
    ]
    assert not unused, "\n".join(unused)


def _used_names(tree, only_exports):
    """Names that a file uses; the imports of an ``__init__`` only pass names on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not only_exports:
            yield from (alias.name for alias in node.names if alias.asname)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value  # __all__, getattr tables, quoted annotations
        elif isinstance(node, ast.MatchClass):
            yield from node.kwd_attrs


def _defined_names(tree):
    """Functions, classes and constants of the module, methods of its classes; dunder names and overrides aside."""
    for node in tree.body:
        yield from _names_of(node)
        if isinstance(node, ast.ClassDef):
            external = any(not isinstance(base, ast.Subscript) and _is_library(base) for base in node.bases)
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not external and not _is_hook(member):
                    yield from _names_of(member)


def _names_of(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if not node.name.startswith("__") and not _is_hook(node):
            yield node.name, node.lineno
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name) and not target.id.startswith("__"):
                yield target.id, node.lineno
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.lineno


def _is_hook(node):
    """Decorated functions are called by whoever decorates them, except plain properties and static methods."""
    plain = {"property", "staticmethod", "classmethod", "contextmanager", "cached_property", "cache", "final"}
    names = {_last_name(decorator) for decorator in getattr(node, "decorator_list", [])}
    return bool(names - plain) and not isinstance(node, ast.ClassDef)


def _is_library(base):
    """Bases whose methods a library calls: overrides need no caller of ours."""
    return _last_name(base) not in {"Struct", "Message", "Section", "Protocol", "ABC", "Enum", "IntEnum", "StrEnum"}


def _last_name(node):
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
