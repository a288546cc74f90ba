"""One concept a module, one thing a function: the ceilings of the house style."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_MODULE_LINES = 300
MAX_TEST_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50


def sources(*packages: str) -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def test_no_module_is_longer_than_its_ceiling() -> None:
    lengths = {
        path: (
            text.count("\n"),
            MAX_TEST_MODULE_LINES if path.startswith("tests") else MAX_MODULE_LINES,
        )
        for path, text in sources(
            "apar_core", "cluster", "dashboards", "deployments", "k8s", "tests"
        ).items()
    }

    assert {path: lines for path, (lines, ceiling) in lengths.items() if lines > ceiling} == {}


def test_no_function_is_longer_than_fifty_lines() -> None:
    too_long = {
        f"{path}:{node.name}": node.end_lineno - node.lineno + 1
        for path, text in sources(
            "apar_core", "cluster", "dashboards", "deployments", "k8s"
        ).items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }

    assert too_long == {}
