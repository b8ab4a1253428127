"""``python -m hybserve.launch ROLE``: one role as a process. ``embedded`` makes the embedded model, prints its path."""

import sys

import msgspec

from hybserve.launch.role import RoleStart, enter
from hybserve.launch.roles import ROLES


def _embedded() -> int:
    from hybserve.models.embedded import ensure_embedded_model

    print(ensure_embedded_model())
    return 0


def main() -> int:
    if sys.argv[1] == "embedded":
        return _embedded()
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=RoleStart)
    return enter(start, ROLES[sys.argv[1]])


if __name__ == "__main__":
    sys.exit(main())
