"""``hybserve demo``, the first thing a newcomer runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


def test_the_demo_serves_streams_and_ends(tmp_path):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    result = subprocess.run(
        [sys.executable, "-m", "hybserve", "demo"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=tmp_path,
        env=env,
    )
    assert result.returncode == 0, result.stderr
    assert "ready at http://127.0.0.1:" in result.stdout
    first, second = re.findall(r"([0-9]+) prompt \+ ([0-9]+) completion tokens, ([0-9]+) cached", result.stdout)
    assert first[2] == "0"
    assert 16 <= int(second[2]) < int(first[0]) + int(first[1])  # whole pages of the first turn
    assert "A dictionary is a " in result.stdout
    assert "exit code 0" in result.stdout
    assert result.stderr == ""


def test_a_demo_that_is_killed_leaves_no_server(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-m", "hybserve", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env) as demo:
        while not demo.stdout.readline().startswith("ready at"):
            assert demo.poll() is None
        family = psutil.Process(demo.pid).children(recursive=True)
        assert len(family) >= 4  # the server and its roles
        demo.kill()
    assert psutil.wait_procs(family, timeout=20)[1] == []
