"""``hybserve demo``, the first thing a newcomer runs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_serves_streams_and_ends(tmp_path):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "XDG_CACHE_HOME": str(tmp_path),  # as on a fresh machine: the model is made on the spot
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
    assert "64 completion tokens" in result.stdout
    assert "exit code 0" in result.stdout
    assert result.stderr == ""
