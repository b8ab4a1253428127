"""``python -m hybserve.launch ROLE``: one role as a process."""

import sys

import msgspec

from hybserve.launch.role import RoleStart, enter
from hybserve.launch.roles import ROLES


def main() -> int:
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=RoleStart)
    return enter(start, ROLES[sys.argv[1]])


if __name__ == "__main__":
    sys.exit(main())
