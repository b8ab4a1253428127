"""``python -m hybserve.launch PARENT ROLE``: one role as a process, which lives no longer than the process PARENT."""

import sys

import msgspec

from hybserve.core.errors import EXIT_OK
from hybserve.launch.role import RoleStart, die_with_parent, enter
from hybserve.launch.roles import ROLES, prepare_engine


def main() -> int:
    parent, role = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    if role == "engine":
        prepare_engine()
    told = sys.stdin.buffer.read()
    if not told:  # it was refused what it was started for
        return EXIT_OK
    return enter(msgspec.json.decode(told, type=RoleStart), ROLES[role])


if __name__ == "__main__":
    sys.exit(main())
