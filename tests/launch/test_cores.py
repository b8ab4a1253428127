import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hybserve.launch.cores import engine_threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def build(real: int | None, usable: int, quota: str | None) -> int:
        monkeypatch.setattr(psutil, "cpu_count", lambda logical: real)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)), raising=False)
        if quota is not None:
            (tmp_path / "cpu.max").write_text(quota + "\n")
        return engine_threads(tmp_path)

    return build


@pytest.mark.parametrize(
    ("real", "usable", "quota", "threads"),
    [
        (2, 2, None, 1),
        (1, 1, None, 1),
        (16, 32, None, 16),  # the siblings of the real cores are enough for the others
        (16, 16, "max 100000", 15),
        (64, 128, "400000 100000", 3),
        (64, 128, "50000 100000", 1),
        (64, 4, None, 3),
        (None, 8, None, 7),
    ],
)
def test_a_core_is_left_to_the_other_roles(machine, real, usable, quota, threads) -> None:
    assert machine(real, usable, quota) == threads


@pytest.mark.parametrize(("stated", "threads"), [({}, str(engine_threads())), ({"OMP_NUM_THREADS": "2"}, "2")])
def test_the_environment_wins_and_torch_obeys(stated: dict[str, str], threads: str) -> None:
    code = "from hybserve.launch.cores import claim_cores; claim_cores(); import torch; print(torch.get_num_threads())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | stated, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == threads
