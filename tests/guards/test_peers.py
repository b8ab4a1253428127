"""Every trouble that users have had elsewhere and that can happen here has a test that names it, as ``peerNN``.

The rows are those of the list of peers' troubles, section "Where users hurt". ``COVERED`` are the ones that concern one
rank with its caches on the device; ``LEFT_OUT`` says of every other row why it has no test yet.
"""

import ast
import re

#: By section of the list: wrong output, stale state, padding, exhaustion, hit rate, planning, ranks, text.
COVERED = (
    "5 11 12 13",
    "16 17 18 20 23 24",
    "26 28",
    "29 30 31 32 33 34 35 37 38 39 40 41",
    "42 43 44 45 47 48 53 55 56 57",
    "59 60 61 62 63",
    "64 69",
    "74",
)

SPECULATION = "there is no speculation"
TIERS = "there is no tier below the device"
RANKS = "there is one rank"
GRAPHS = "there are no graphs: nothing is padded, and the padding ids are watched by the canary (peer26)"

LEFT_OUT = {
    1: SPECULATION,
    3: TIERS + "; that a checkpoint stands where it says is asserted on publishing and recounted",
    4: SPECULATION + ", and no connector",
    6: TIERS,
    7: SPECULATION,
    8: SPECULATION,
    9: TIERS + ": copies run in the order of compute",
    10: "every kind of layer that is read has checkpoints; other kinds are refused with the model",
    14: SPECULATION,
    19: "there is no sleep",
    22: SPECULATION,
    25: GRAPHS,
    27: GRAPHS,
    50: TIERS,
    51: TIERS,
    52: TIERS,
    54: TIERS,
    66: SPECULATION + " and " + RANKS,
    67: RANKS,
    68: RANKS + " and " + TIERS,
    70: RANKS,
    71: RANKS + ", which prefills and decodes",
    72: RANKS + ", which prefills and decodes",
    75: SPECULATION,
}

#: Numbers of the list, which has gaps.
ALL = set(range(1, 76)) - {2, 15, 21, 36, 46, 49, 58, 65, 73}


def covered() -> set[int]:
    return {int(number) for section in COVERED for number in section.split()}


def test_every_row_is_named_by_a_test(root):
    named = set()
    for path in (root / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                named |= {int(digits) for digits in re.findall(r"peer(\d+)(?![0-9])", node.name)}
    assert covered() <= named, f"no test is named after {sorted(covered() - named)}"
    assert named <= covered(), f"tests name {sorted(named - covered())}, which are not listed as covered"


def test_every_row_is_covered_or_left_out_for_a_reason():
    assert covered() | LEFT_OUT.keys() == ALL
    assert not covered() & LEFT_OUT.keys()
    assert all(LEFT_OUT.values())
