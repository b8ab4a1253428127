"""Imports point down, equal floors do not know each other, and nothing is imported inside functions."""

import ast

FLOORS = {
    "core": 0,
    "wire": 1,
    "spec": 1,
    "observe": 1,
    "config": 2,
    "cache": 3,
    "plan": 3,
    "parallel": 3,
    "layers": 4,
    "models": 5,
    "api": 6,
    "text": 6,
    "scheduler": 6,
    "runner": 6,
    "explain": 7,
    "launch": 7,
    "cli": 8,
    "__main__": 9,
}
_KERNELS_FROM = FLOORS["layers"]
#: Files whose functions may import, to keep the command line and the roles light.
_LAZY = ("hybserve.cli", "hybserve.launch")


def test_every_package_has_a_floor(sources):
    packages = {source.package for source in sources if source.package}
    assert packages <= set(FLOORS)


def test_imports_point_down(sources):
    wrong = []
    for source in sources:
        for name, line in source.imports():
            parts = name.split(".")
            if parts[0] == "hybserve" and not _may_import(source.package, parts[1], source.module):
                wrong.append(f"{source.path}:{line}: {name}")
            if parts[0] == "hybserve_kernels" and source.package and FLOORS[source.package] < _KERNELS_FROM:
                wrong.append(f"{source.path}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


def _may_import(package, target, module):
    if module.startswith("hybserve_kernels"):
        return False
    if target == package or target not in FLOORS:  # itself, or a name of the top package such as __version__
        return True
    return package != "" and FLOORS[target] < FLOORS[package]


def test_nothing_is_imported_inside_functions(sources):
    wrong = []
    for source in sources:
        if source.module.startswith(_LAZY):
            continue
        for function in ast.walk(source.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                wrong += [
                    f"{source.path}:{node.lineno}"
                    for node in ast.walk(function)
                    if isinstance(node, ast.Import | ast.ImportFrom)
                ]
    assert not wrong, "\n".join(wrong)


def test_the_kernels_folder_is_no_package(root):
    assert not (root / "kernels" / "__init__.py").exists()
    assert (root / "kernels" / "hybserve_kernels" / "__init__.py").exists()


def test_tests_have_no_packages(root):
    assert not list((root / "tests").rglob("__init__.py"))
