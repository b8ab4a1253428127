"""A server of our own for a bench that speaks HTTP: started, watched while it runs, ended."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from bench import ROOT
from bench.dummy import MODELS, write_model_directory
from hybserve.launch.role import die_with_parent

EMBEDDED = "embedded"
_READY = re.compile(r"ready at (http://\S+)")
#: What the models that need a GPU are served with unless the command line says otherwise.
ON_GPU = ("m1", "m2")
_GPU_SETTINGS = ("engine.backend=cuda", "engine.max_running=256", "engine.max_seq_len=40960")


class Server:
    """One `hybserve serve`, ready. ``report`` is what it printed at its start, ``ready_s`` how long that took."""

    def __init__(self, process: psutil.Popen, url: str, report: list[str], ready_s: float, log: Path) -> None:
        self.url, self.report, self.ready_s, self._log = url, report, ready_s, log
        self.processes = {"launch": process} | {_role(child): child for child in process.children(recursive=True)}

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of each stage of the start, as the startup report says."""
        line = self._line("start")
        parts = [part.rpartition(" ") for part in line.partition(" = ")[2].split(" + ")]
        return {name: float(seconds) for name, _, seconds in parts if name}

    @property
    def dtype(self) -> str:
        """Of the weights, as the startup report says: ``fp32``, ``bf16`` …"""
        return self._line("model").partition(" in ")[2].split()[0]

    def _line(self, label: str) -> str:
        return next(line for line in self.report if line.split()[:1] == [label])

    def log_errors(self) -> list[str]:
        """Lines of the log so far that say error, or begin a traceback that escaped it."""
        lines = self._log.read_text().splitlines()
        return [line for line in lines if '"level": "error"' in line or line.startswith("Traceback")]

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of every process since its start."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}

    def resident(self) -> dict[str, int]:
        """Bytes of memory of every process."""
        return {name: process.memory_info().rss for name, process in self.processes.items()}


def _role(process: psutil.Process) -> str:
    command = process.cmdline()
    return "worker" if "hybserve.text.worker" in command else command[-1]


@contextlib.contextmanager
def own_server(model: str = EMBEDDED, settings: Sequence[str] = ()) -> Iterator[Server]:
    """`hybserve serve` on a free port: the embedded model, or one of ``dummy.MODELS`` with random weights.

    ``settings``: ``KEY=VALUE`` texts that win over what the bench would say. Raises SystemExit with the end of the
    log when the server does not get ready.
    """
    with tempfile.TemporaryDirectory() as work:
        sets = ["server.port=0", "log.format=json", *_settings(model, Path(work)), *settings]
        command = [sys.executable, "-m", "hybserve", "serve", *(part for text in sets for part in ("--set", text))]
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
        log = Path(work) / "log"
        began = time.monotonic()
        with log.open("w") as stderr:
            process = psutil.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        try:
            yield _wait_until_ready(process, began, log)
        finally:
            _end(process)


def _end(process: psutil.Popen) -> None:
    """Ask it to end; kill what has not after a minute."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()
        for left in psutil.wait_procs(family, timeout=60)[1]:
            left.kill()
    process.wait(10)


def _settings(model: str, work: Path) -> list[str]:
    if model == EMBEDDED:
        return []
    directory = write_model_directory(work / model, MODELS[model])
    sets = [f"model.path={directory}", "model.load=dummy", f"model.served_name={model}"]
    return [*sets, *_GPU_SETTINGS] if model in ON_GPU else sets


def _wait_until_ready(process: psutil.Popen, began: float, log: Path) -> Server:
    report: list[str] = []
    for line in process.stdout:
        report.append(line.rstrip("\n"))
        if found := _READY.match(line):
            return Server(process, found.group(1), report, time.monotonic() - began, log)
    raise SystemExit(f"the server did not get ready:\n{log.read_text()[-4000:]}")
