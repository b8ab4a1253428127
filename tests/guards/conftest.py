"""The product's own source files, parsed once for all guards."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Source:
    module: str  # dotted name
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """First name below ``hybserve``; "" for the package itself and for kernels."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "hybserve" and len(parts) > 1 else ""

    def imports(self) -> list[tuple[str, int]]:
        """Absolute dotted names that are imported anywhere in the file, with their lines."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: relative import"
                found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        return found


def _sources() -> list[Source]:
    found = []
    for base, package in ((ROOT, "hybserve"), (ROOT / "kernels", "hybserve_kernels")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            found.append(Source(module, path.relative_to(ROOT), text, ast.parse(text)))
    return found


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    return _sources()


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
