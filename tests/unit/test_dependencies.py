"""Imports point down, without cycles, and each library is imported only in its place.

Packages: cluster -> deployments -> apar_core. Inside deployments:
app -> gateway -> relay, routing -> wire <- replica, all above metrics -> config.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("apar_core", "cluster", "dashboards", "deployments")
# Packages that are in the repository but not in the installed distribution.
REPOSITORY_ONLY = {"benchmarks", "k8s", "tests"}

FORBIDDEN = {
    "apar_core": {"cluster", "dashboards", "deployments", "ray", "fastapi", "starlette"},
    "cluster": {"dashboards"},
    # The dashboards are generated from the metric catalogue, without a running process.
    "dashboards": {
        "apar_core",
        "cluster",
        *(f"deployments.{name}" for name in ("app", "gateway", "relay", "replica", "routing")),
        "ray",
        "vllm",
    },
    "deployments": {"cluster", "dashboards"},
}
# The console script starts the command line from a package whose name is ours alone.
COMMAND = Path("apar_core/command.py")
# Of apar_core's subpackages, those that may import a library.
ALLOWED_IN = {
    "vllm": {"attention", "engine", "scheduler"},
    "transformers": {"offline"},
}
# Imports vLLM's names for all others, when they are first used.
VLLM_NAMES = Path("apar_core/vllm_names.py")
# The subpackages that a subpackage may import.
LAYERS = {
    "apar_core": {
        "attention": set(),
        "step_costs": {"models"},
        "tree": set(),
        "formats": set(),
        "models": set(),
        "scheduler": {"attention", "formats", "step_costs", "tree"},
        "metrics": {"scheduler", "tree"},
        "engine": {"attention", "formats", "metrics", "scheduler", "tree"},
        "offline": {"formats", "models", "step_costs", "tree"},
    },
    "apar_core.offline": {
        "data": set(),
        "training": {"data"},
        "speculation": {"data", "training"},
        "decoders": {"speculation", "training"},
        "evaluation": {"data", "decoders", "speculation", "training"},
        "generation": {"data", "evaluation", "training"},
    },
    "cluster": {
        "cli": {"conversion", "lab", "loadtest", "monitor"},
        "conversion": set(),
        "lab": {"loadtest", "monitor"},
        "loadtest": {"monitor"},
        "monitor": set(),
    },
    "deployments": {
        "app": {
            "config",
            "gateway",
            "metrics",
            "relay",
            "replica",
            "routing",
            "tracing",
            "wire",
        },
        "gateway": {"config", "metrics", "relay", "routing", "tracing", "wire"},
        "relay": {"config", "routing", "wire"},
        "replica": {"config", "metrics", "tracing", "wire"},
        "routing": {"config", "wire"},
        "tracing": {"config"},
        "wire": {"config"},
        "metrics": {"config"},
        "config": set(),
    },
}

MODULE_NAME = re.compile(r"([a-z_]\w*(?:\.[a-z_]\w*)+)(?:[.:][A-Za-z_]\w*)?")
LOADERS = {"__import__", "import_module"}


def modules(package: str) -> list[Path]:
    return sorted(ROOT.joinpath(*package.split(".")).rglob("*.py"))


def named_module(text: str) -> str | None:
    """Return the repository's module that a string names, as `package.module[:name]`."""
    match = MODULE_NAME.fullmatch(text)
    if match is None:
        return None
    path = ROOT / match[1].replace(".", "/")
    return match[1] if path.is_dir() or path.with_suffix(".py").is_file() else None


def loaded_module(call: ast.Call, constants: set[str]) -> str | None:
    """Return what a call of `import_module` or `__import__` loads, None for other calls."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else None
    if isinstance(call.func, ast.Name):
        name = call.func.id
    if name not in LOADERS or not call.args:
        return None
    module = call.args[0]
    if isinstance(module, ast.Constant):
        return str(module.value)
    # `imported_modules` reports the string in the constant's own line.
    names = {each.id for each in ast.walk(module) if isinstance(each, ast.Name)}
    return None if names & constants else "<computed>"


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import: statements, loader calls and names in strings."""
    tree = ast.parse(source)
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        # A relative import stays in its own package.
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call):
            if (loaded := loaded_module(node, constants)) is not None:
                yield node.lineno, loaded
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (named := named_module(node.value)) is not None
        ):
            yield node.lineno, named


def violations(package: str, path: Path, source: str) -> list[str]:
    """Describe the forbidden imports of a module; `path` is relative to the repository."""
    subpackage = path.parts[1] if len(path.parts) > 2 else ""
    rules = FORBIDDEN["cluster" if path == COMMAND else package]
    found = []
    for line, imported in imported_modules(source):
        top = imported.partition(".")[0]
        if path == VLLM_NAMES and top in ("vllm", "<computed>"):
            continue
        misplaced = package == "apar_core" and subpackage not in ALLOWED_IN.get(top, {subpackage})
        forbidden = any(
            f"{imported}.".startswith(f"{rule}.")
            for rule in rules | REPOSITORY_ONLY | {"<computed>"}
        )
        if misplaced or forbidden:
            violation = f"{path}:{line} imports {imported}"
            if violation not in found:
                found.append(violation)
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


def layer_violations(package: str, path: Path, source: str) -> list[str]:
    """Describe the imports of a module that point up inside its package."""
    layers = LAYERS[package]
    depth = package.count(".") + 1
    own = path.parts[depth]
    found = []
    for line, imported in imported_modules(source):
        if own not in layers or not imported.startswith(f"{package}."):
            continue
        other = imported.split(".")[depth]
        if other in layers and other != own and other not in layers[own]:
            found.append(f"{path}:{line} imports {imported}")
    return found


@pytest.mark.parametrize("package", LAYERS)
def test_imports_inside_a_package_point_down(package: str) -> None:
    folder = ROOT.joinpath(*package.split("."))
    folders = {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}

    assert set(LAYERS[package]) == folders
    found = [
        violation
        for path in modules(package)
        for violation in layer_violations(package, path.relative_to(ROOT), path.read_text())
    ]
    assert found == []


def test_trees_and_parameters_of_requests_need_no_library() -> None:
    names = ("tree", "tree.threads", "formats.control_tokens", "fork_parameters", "journal")
    imports = ", ".join(f"apar_core.{name}" for name in names)
    program = (
        f"import sys; known = set(sys.modules); import {imports};"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - known})"
    )

    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    loaded = set(found.stdout.split())
    assert loaded - sys.stdlib_module_names == {"apar_core"}


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports anywhere, also in functions, by dotted name."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(source)):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} has a relative import"
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            for each in imported:
                parts = each.split(".")
                prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
                known = next((prefix for prefix in prefixes if prefix in sources), name)
                graph[name] |= {known} - {name}
    return graph


def test_no_modules_import_each_other() -> None:
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            path.read_text()
        )
        for package in (*PACKAGES, "k8s")
        for path in modules(package)
    }

    # Raises CycleError, which names the modules.
    TopologicalSorter(import_graph(sources)).prepare()


def test_a_cycle_is_found_wherever_its_imports_stand() -> None:
    sources = {
        "pkg": "",
        "pkg.a": "if TYPE_CHECKING:\n    from pkg.b import B",
        "pkg.b": "def late():\n    import pkg.c",
        "pkg.c": "from pkg import a",
    }

    with pytest.raises(CycleError, match="cycle"):
        TopologicalSorter(import_graph(sources)).prepare()


@pytest.mark.parametrize(
    ("path", "source", "num_violations"),
    [
        ("deployments/relay/relay.py", "from deployments.wire.errors import response_for", 0),
        ("deployments/relay/relay.py", "from deployments.gateway.body import RequestBody", 1),
        ("deployments/wire/errors.py", "def late():\n    import deployments.relay.relay", 1),
        ("deployments/gateway/gateway.py", "from deployments.replica import asgi", 1),
        ("deployments/app/service.py", "from deployments.gateway.gateway import Gateway", 0),
        ("deployments/replica/replica.py", "from deployments.app.autoscaling import report", 1),
        ("apar_core/scheduler/batch.py", "from apar_core.engine import plugin", 1),
        ("apar_core/scheduler/batch.py", "from apar_core.errors import AparError", 0),
    ],
)
def test_the_layers_find_what_they_should(path: str, source: str, num_violations: int) -> None:
    package = path.partition("/")[0]

    assert len(layer_violations(package, Path(path), source)) == num_violations


@pytest.mark.parametrize(
    ("package", "path", "source", "expected"),
    [
        ("apar_core", "apar_core/tree/paragraph.py", "import vllm.config", ["vllm.config"]),
        (
            "apar_core",
            "apar_core/errors.py",
            "from transformers import AutoTokenizer",
            ["transformers.AutoTokenizer"],
        ),
        ("apar_core", "apar_core/engine/plugin.py", "from vllm.v1 import engine", []),
        ("apar_core", "apar_core/engine/plugin.py", "def late():\n    import ray", ["ray"]),
        (
            "deployments",
            "deployments/logs.py",
            "from cluster import local_ray",
            ["cluster.local_ray"],
        ),
        ("deployments", "deployments/replica/replica.py", "import vllm, ray, apar_core.tree", []),
        (
            "deployments",
            "deployments/logs.py",
            "import importlib\nimportlib.import_module('cluster')",
            ["cluster"],
        ),
        (
            "deployments",
            "deployments/logs.py",
            "MODULE = 'cluster.local_ray'\nimport_module(MODULE)",
            ["cluster.local_ray"],
        ),
        (
            "deployments",
            "deployments/logs.py",
            "def load(name):\n    __import__(name)",
            ["<computed>"],
        ),
        (
            "deployments",
            "deployments/logs.py",
            "NAME = 'cluster.local_ray:local_ray'",
            ["cluster.local_ray"],
        ),
        ("deployments", "deployments/logs.py", "'cluster.of_no_such_module'", []),
        ("deployments", "deployments/logs.py", "'''See cluster.local_ray for more.'''", []),
        ("cluster", "cluster/cli/serve.py", "from deployments.app.service import running", []),
        ("deployments", "deployments/app/service.py", "import cluster.cli", ["cluster.cli"]),
        ("deployments", "deployments/app/service.py", "import benchmarks", ["benchmarks"]),
        ("apar_core", "apar_core/tree/restore.py", "import_module('vllm')", ["vllm"]),
    ],
)
def test_the_rules_find_what_they_should(
    package: str, path: str, source: str, expected: list[str]
) -> None:
    found = violations(package, Path(path), source)

    assert [violation.rsplit(" ", 1)[1] for violation in found] == expected
