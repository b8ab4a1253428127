"""The engine's process, begun before the configuration is read: what it imports takes longer than all that is checked
meanwhile. Until it is told what to serve it does nothing else, and it is told nothing when that is refused."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hybserve.launch.group import RoleGroup


class Ahead(NamedTuple):
    """``roles`` has the engine in it; ``to_engine`` is the text role's end of the link between them."""

    roles: RoleGroup
    to_engine: socket.socket


@contextmanager
def engine_ahead() -> Iterator[Ahead]:
    """Leaving ends all roles, whatever happened."""
    to_engine, to_text = socket.socketpair()
    with to_engine, RoleGroup() as roles:
        roles.start("engine", {"text": to_text})
        yield Ahead(roles, to_engine)
