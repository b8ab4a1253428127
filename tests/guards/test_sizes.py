"""Large files and functions are listed for a look; beyond a hard limit they fail."""

import ast
import warnings

_LOOK, _LIMIT = 600, 900
_LONG_FUNCTION = 80


def test_files_stay_readable(sources):
    lengths = {source.path: source.text.count("\n") for source in sources}
    for path, length in lengths.items():
        if length > _LOOK:
            warnings.warn(f"{path} has {length} lines: worth a look", stacklevel=1)
    assert not {path: length for path, length in lengths.items() if length > _LIMIT}


def test_long_functions_are_listed(sources):
    for source in sources:
        if source.module.startswith("hybserve_kernels"):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno
                if length > _LONG_FUNCTION:
                    warnings.warn(f"{source.path}:{node.lineno} {node.name} has {length} lines", stacklevel=1)
