"""The engine's process begins before it is known what to serve."""

import subprocess
import sys

import psutil

from hybserve.launch.ahead import engine_ahead
from hybserve.launch.group import child_environment


def test_an_engine_that_is_told_nothing_ends_without_a_word():
    ran = subprocess.run(
        [sys.executable, "-m", "hybserve.launch", "engine"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=child_environment(),
        timeout=120,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_nothing_is_left_when_what_comes_next_is_refused():
    with engine_ahead() as ahead:
        engine = ahead.roles.roles["engine"].process
        assert psutil.Process(engine.pid).cmdline()[-1] == "engine"
        assert engine.poll() is None
    assert engine.poll() is not None
    assert ahead.to_engine.fileno() == -1
