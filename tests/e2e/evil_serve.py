"""``hybserve serve`` with an impatient watchdog and an engine that fails on command (see evil_engine.py).

Usage: evil_serve.py [--set KEY=VALUE]...  The watchdog's patience in seconds stands in EVIL_SILENCE.
"""

import os
import sys
from pathlib import Path

from hybserve.config.load import load_deployment
from hybserve.launch import group
from hybserve.launch.ahead import engine_ahead
from hybserve.launch.serve import serve

_ENGINE = str(Path(__file__).with_name("evil_engine.py"))
_start = group.RoleGroup.start


def start(self, name, links, command=None):
    return _start(self, name, links, [sys.executable, _ENGINE, str(os.getpid()), name] if name == "engine" else command)


if __name__ == "__main__":
    group.RoleGroup.start = start
    with engine_ahead() as ahead:
        code = serve(load_deployment(None, sys.argv[2::2]), ahead, silence=float(os.environ["EVIL_SILENCE"]))
    sys.exit(code)
