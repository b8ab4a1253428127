"""Roles and commands without tensors do not import torch; the command line answers at once."""

import json
import subprocess
import sys

import pytest

_PROBE = """
import importlib, json, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def loaded_by(*names):
    result = subprocess.run(
        [sys.executable, "-c", _PROBE, *names], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "package",
    ["core", "wire", "spec", "observe", "config", "plan", "cache", "scheduler", "text", "api", "cli", "launch"],
)
def test_no_torch_where_there_are_no_tensors(package):
    assert not loaded_by(f"hybserve.{package}") & {"torch", "transformers", "triton"}


def test_the_command_line_loads_next_to_nothing():
    assert not loaded_by("hybserve.cli") & {
        "torch", "numpy", "pydantic", "uvicorn", "starlette", "rich", "jinja2", "tokenizers", "yaml", "psutil",
    }  # fmt: skip


@pytest.mark.parametrize("package", ["core"])
def test_core_needs_msgspec_alone(package):
    third_party = (
        loaded_by(f"hybserve.{package}") - set(sys.stdlib_module_names) - {"hybserve", "msgspec", "typing_extensions"}
    )
    own_start = loaded_by()  # what the interpreter's site loads by itself
    assert third_party - own_start == set()


def test_kernels_know_nothing_of_the_server():
    assert "hybserve" not in loaded_by("hybserve_kernels")
