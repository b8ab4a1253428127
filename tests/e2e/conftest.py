"""A real server with all its processes, serving a tiny random model, for tests that speak HTTP to it.

``live_server`` is shared by all tests of a worker: do not hurt it. ``start_server`` makes one that may be hurt.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.random_model import ensure_random_model

ROOT = Path(__file__).parents[2]
_START_TIMEOUT = 120
_READY = re.compile(r"ready at (http://([0-9.]+):([0-9]+))")


class Server:
    """One ``hybserve serve`` process. ``url`` ends without a slash; ``report`` is what it printed at the start."""

    def __init__(self, *sets, script=None, env=None):
        options = [
            f"model.path={ensure_random_model()}",  # named, so that the server need not look for it
            "model.served_name=random",
            "server.port=0",
            "log.format=json",
            "engine.max_running=4",
            "memory.device=256MiB",
            *sets,
        ]
        settings = [part for option in options for part in ("--set", option)]
        command = [sys.executable, script] if script else [sys.executable, "-m", "hybserve", "serve"]
        self.process = psutil.Popen(
            [*command, *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
        )
        self.report: list[str] = []
        self.log: list[dict] = []
        self.noise: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_report, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        self._is_ready = threading.Event()
        self.url = self.host = ""
        self.port = 0
        for reader in self._readers:
            reader.start()

    def _read_report(self):
        for line in self.process.stdout:
            self.report.append(line.rstrip("\n"))
            if found := _READY.match(line):
                self.url, self.host, self.port = found.group(1), found.group(2), int(found.group(3))
                self._is_ready.set()
        self._is_ready.set()

    def _read_log(self):
        for line in self.process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.noise.append(line.rstrip("\n"))

    def wait_until_ready(self):
        assert self._is_ready.wait(_START_TIMEOUT), "the server did not get ready"
        assert self.url, f"the server ended: {self.noise[-20:]} {self.log[-20:]}"
        return self

    def role(self, name):
        """The process of a role, by its command line."""
        for child in self.process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.cmdline()[-1:] == [name]:
                    return child
        raise AssertionError(f"no process of role {name}")

    def request(self, method, path, body=None, headers=None, timeout=60):
        """(status, headers, decoded JSON or text)."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return response.status, dict(response.getheaders()), json.loads(text)
        return response.status, dict(response.getheaders()), text

    def open_stream(self, path="/v1/completions", **body):
        return Stream(self, path, body)

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self, timeout=60):
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(10)
        return code

    def kill(self):
        """End everything, whatever state it is in."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = self.process.children(recursive=True)
            self.process.kill()
            psutil.wait_procs(children, timeout=10)
        self.process.wait(10)


class Stream:
    """A streaming completion; ``events`` yields the decoded events, "[DONE]" included as that text."""

    def __init__(self, server, path, body):
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        self._connection.request(
            "POST", path, json.dumps({"stream": True, **body}), {"Content-Type": "application/json"}
        )
        self.response = self._connection.getresponse()
        self.status = self.response.status

    def events(self):
        for raw in self.response:
            line = raw.decode().strip()
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)

    def close(self):
        self._connection.close()


@pytest.fixture(scope="session")
def live_server():
    server = Server()
    try:
        yield server.wait_until_ready()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.kill()


@pytest.fixture
def start_server():
    """Call it to start a server; ``--set`` texts as arguments. All are ended, and none may leave a process behind."""
    servers = []

    def start(*sets, **options):
        server = Server(*sets, **options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def no_orphans():
    """Call it with processes: all must be gone (not even zombies of ours) within ten seconds."""

    def check(processes):
        deadline = time.monotonic() + 10
        alive = list(processes)
        while alive and time.monotonic() < deadline:
            alive = [process for process in alive if process.is_running() and _state(process) != psutil.STATUS_ZOMBIE]
            time.sleep(0.05)
        assert not alive, f"left behind: {alive}"

    return check


def _state(process):
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE
