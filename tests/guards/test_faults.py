"""Every fault that this stage answers has a test that names it."""

import ast
import re

#: Rows of the fault list that apply so far: HTTP front, parameters, engine, prefix tree, processes, model files.
ROWS = (
    "F01 F02 F03 F04 F06 F07 F08 F09 F11 F13 F14 F15 F17 F19 F20 F21 F22 F23 F25 F26 F27 F28 F29 F30 F31 F32 F33 F34 "
    "F38 F39 F40 F41 F43 F50 F51 F52 F53 F55 F56 F57 F61 F62 F63 F67 F68 F70 F71 F72 F75 F77 F78 F80 F81 F82 F83 F84 "
    "F86"
)


def test_every_fault_row_is_named_by_a_test(root):
    named = set()
    for path in (root / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                named |= {f"F{digits}" for digits in re.findall(r"_[Ff](\d{2,3})(?![0-9])", node.name)}
    missing = [row for row in ROWS.split() if row not in named]
    assert not missing, f"no test is named after {', '.join(missing)}"
