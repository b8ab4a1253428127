"""The parts of a start that need no process: the listening socket, the clock of the stages, signals, the load bar."""

import logging
import os
import select
import signal
import socket
import sys
import time

import psutil
import pytest

from hybserve.core.errors import ConfigError
from hybserve.core.messages import Loading
from hybserve.launch.progress import LoadProgress
from hybserve.launch.serve import StageClock, bind
from hybserve.launch.signals import StopSignals


def test_a_socket_of_any_free_port():
    with bind("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        assert sock.getsockname()[1] > 0


def test_F77_a_taken_port_names_the_key():
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConfigError, match=r"server\.port.*in use"):
        bind("127.0.0.1", sock.getsockname()[1])


def test_F77_an_unknown_host_names_the_key():
    with pytest.raises(ConfigError, match=r"server\.host"):
        bind("no.such.host.invalid", 0)


def test_stage_times_sum_to_the_time_since_the_process_began():
    clock = StageClock()
    clock.lap("plan")
    clock.lap_split("processes", [("weights", 0.0)])
    age = time.time() - psutil.Process().create_time()
    assert [name for name, _ in clock.times] == ["interpreter", "plan", "processes", "weights"]
    assert all(seconds >= 0 for _, seconds in clock.times)
    assert sum(seconds for _, seconds in clock.times) == pytest.approx(age, abs=1.1)  # psutil rounds the time of boot


def test_signals_are_counted_and_wake_the_loop():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([signals.wake], [], [], 5)[0]
        assert signals.count() == 1
        signals.clear_wake()
        assert not select.select([signals.wake], [], [], 0)[0]
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.count() == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_loading_tells_bytes_and_speed(caplog):
    caplog.set_level(logging.INFO)
    with LoadProgress(3_000_000_000) as progress:
        progress.show(Loading("weights", 0.5))
        progress.show(Loading("weights", 1.0))
    (record,) = caplog.records
    assert record.fields["detail"].startswith("3.00 of 3.00 GB, ")
    assert record.fields["detail"].endswith("GB/s")


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with LoadProgress(3_000_000_000) as progress:
        progress.show(Loading("weights", 0.25))
        assert "0.75 of 3.00 GB" in progress._detail(Loading("weights", 0.25))
