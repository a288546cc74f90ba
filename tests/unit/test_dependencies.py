"""Imports point one way: deployments -> cluster -> apar_core, and each library has its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("apar_core", "cluster", "dashboards", "deployments")

FORBIDDEN = {
    "apar_core": {"cluster", "dashboards", "deployments", "ray", "fastapi", "starlette"},
    "cluster": {"dashboards", "deployments"},
    # What is looked at is made from the catalogue, beside the running processes.
    "dashboards": {"apar_core", "deployments", "ray", "vllm"},
    "deployments": {"dashboards"},
}
# Of apar_core's subpackages, those that may import a library.
ALLOWED_IN = {
    "vllm": {"engine", "scheduler"},
    "transformers": {"decoders", "evaluation", "training"},
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_packages(source: str) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        # A relative import stays in its own package.
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.lineno, node.module.partition(".")[0]


def violations(package: str, path: Path, source: str) -> list[str]:
    """What a module imports against the rules; `path` is relative to the repository."""
    subpackage = path.parts[1] if len(path.parts) > 2 else ""
    found = []
    for line, imported in imported_packages(source):
        misplaced = package == "apar_core" and subpackage not in ALLOWED_IN.get(
            imported, {subpackage}
        )
        if imported in FORBIDDEN[package] or misplaced:
            found.append(f"{path}:{line} imports {imported}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    paths = modules(package)
    assert paths

    found = [
        violation
        for path in paths
        for violation in violations(package, path.relative_to(ROOT), path.read_text())
    ]

    assert found == []


@pytest.mark.parametrize(
    ("package", "path", "source", "expected"),
    [
        ("apar_core", "apar_core/tree/paragraph.py", "import vllm.config", ["vllm"]),
        (
            "apar_core",
            "apar_core/errors.py",
            "from transformers import AutoTokenizer",
            ["transformers"],
        ),
        ("apar_core", "apar_core/engine/plugin.py", "from vllm.v1 import engine", []),
        ("apar_core", "apar_core/engine/plugin.py", "def late():\n    import ray", ["ray"]),
        ("cluster", "cluster/router.py", "from deployments import replica", ["deployments"]),
        ("deployments", "deployments/replica.py", "import vllm, ray, cluster.config", []),
    ],
)
def test_the_rules_find_what_they_should(
    package: str, path: str, source: str, expected: list[str]
) -> None:
    found = violations(package, Path(path), source)

    assert [violation.rsplit(" ", 1)[1] for violation in found] == expected
