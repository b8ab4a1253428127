"""The engine's process begins before it is known what to serve."""

import os
import subprocess
import sys

import psutil
import pytest

from hybserve.core.errors import EXIT_FATAL
from hybserve.launch.ahead import engine_ahead
from hybserve.launch.group import child_environment


def test_an_engine_that_is_told_nothing_ends_without_a_word():
    ran = subprocess.run(
        [sys.executable, "-m", "hybserve.launch", str(os.getpid()), "engine"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=child_environment(),
        timeout=120,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


@pytest.mark.parametrize("role", ["engine", "text"])
def test_a_role_whose_parent_is_dead_already_ends_before_it_imports_anything(role):
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hybserve.launch", "1", role],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=child_environment(),
        timeout=120,
    )
    assert ran.returncode == EXIT_FATAL
    assert b" torch\n" not in ran.stderr


def test_nothing_is_left_when_what_comes_next_is_refused():
    with engine_ahead() as ahead:
        engine = ahead.roles.roles["engine"].process
        assert psutil.Process(engine.pid).cmdline()[-1] == "engine"
        assert engine.poll() is None
    assert engine.poll() is not None
    assert ahead.to_engine.fileno() == -1
