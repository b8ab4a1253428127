"""One version everywhere, and a wheel that holds both packages."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

from setuptools import find_packages

import hybserve


def test_one_version(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    released = re.search(r"^## \[([^\]]+)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None
    assert project["version"] == hybserve.__version__ == released.group(1)


def test_no_package_is_left_out(root):
    include = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    found = {name for where in (root, root / "kernels") for name in find_packages(str(where), include=include)}
    for base, package in ((root, "hybserve"), (root / "kernels", "hybserve_kernels")):
        for path in (base / package).rglob("*.py"):
            assert ".".join(path.relative_to(base).parent.parts) in found, f"{path} is in no package"


def test_the_wheel_holds_both_packages(root, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    for name in ("hybserve", "kernels"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "dist",
        ".",
    ]
    subprocess.run(build, cwd=source, check=True, timeout=200, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for expected in (
        "hybserve/cli.py",
        "hybserve/py.typed",
        *(f"hybserve/embedded/{path.name}" for path in (root / "hybserve/embedded").iterdir()),
        "hybserve_kernels/__init__.py",
        "hybserve_kernels/py.typed",
    ):
        assert expected in names
    assert not [name for name in names if name.startswith(("tests/", "kernels/", "bench/"))]
