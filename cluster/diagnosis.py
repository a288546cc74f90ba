"""What this machine and its installed packages offer, and what is wrong with them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import psutil

TESTED_VERSIONS = {"vllm": "0.32.0", "ray": "2.60.0", "torch": "2.13.0", "transformers": "5.19.0"}
_CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN_NAME = "apar"
# One replica of the embedded model takes 2 to 2.5 GB, Ray itself about 1 GB.
_NEEDED_MEMORY_BYTES = 4 * 2**30
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact; `problem` says what to do about it, None where all is well."""

    name: str
    value: str
    problem: str | None = None


def diagnose() -> list[Finding]:
    """All findings about packages and hardware."""
    versions = installed_versions()
    return [
        Finding("python", platform.python_version()),
        *check_versions(versions),
        *check_cuda_only_packages(versions),
        check_plugin(),
        Finding("cpu", _cpu()),
        check_memory(psutil.virtual_memory().available, psutil.virtual_memory().total),
        *_gpus(),
    ]


def installed_versions() -> dict[str, str]:
    """Versions by package; vLLM's CPU build goes by the name of `vllm` as well."""
    versions: dict[str, str] = {}
    for package in ("vllm", "ray", "torch", "transformers", *_CUDA_ONLY):
        for distribution in (package, f"{package}-cpu"):
            try:
                versions[package] = version(distribution)
            except PackageNotFoundError:
                continue
            break
    return versions


def check_versions(versions: Mapping[str, str]) -> list[Finding]:
    """Forking leans on private names of vLLM, so another version is worth a warning."""
    findings = []
    for package, tested in TESTED_VERSIONS.items():
        installed = versions.get(package)
        problem = None
        if installed is None:
            problem = f"not installed; {tested} is needed: make venv"
        elif installed.partition("+")[0] != tested:
            problem = f"tested with {tested}: make venv"
        findings.append(Finding(package, installed or "missing", problem))
    return findings


def check_cuda_only_packages(versions: Mapping[str, str]) -> list[Finding]:
    """CUDA builds beside a CPU torch keep transformers and vLLM from being imported."""
    if "+cpu" not in versions.get("torch", ""):
        return []
    return [
        Finding(
            package,
            versions[package],
            f"a CUDA build beside a CPU torch breaks vLLM: pip uninstall {package}",
        )
        for package in _CUDA_ONLY
        if package in versions and "+cpu" not in versions[package]
    ]


def check_plugin() -> Finding:
    """Whether vLLM will find this package's plugin in every process it starts."""
    for entry_point in entry_points(group=_PLUGIN_GROUP):
        if entry_point.name == _PLUGIN_NAME:
            return Finding("vLLM plugin", entry_point.value)
    return Finding("vLLM plugin", "missing", "vLLM will not fork: pip install --no-deps -e .")


def check_memory(available_bytes: int, total_bytes: int) -> Finding:
    """Whether a replica of the embedded model finds room."""
    value = f"{available_bytes / _GIB:.1f} GiB available of {total_bytes / _GIB:.1f}"
    if available_bytes >= _NEEDED_MEMORY_BYTES:
        return Finding("memory", value)
    wanted = _NEEDED_MEMORY_BYTES // _GIB
    return Finding("memory", value, f"less than the {wanted} GiB that `apar serve` may take")


def _cpu() -> str:
    model = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        names = [line for line in facts.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {psutil.cpu_count(logical=False)} cores"


def _gpus() -> list[Finding]:
    """One finding a GPU, as NVIDIA's tool tells them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [Finding("gpu", "none")]
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:
        return [Finding("gpu", "unknown", f"nvidia-smi failed: {answer.stderr.strip()}")]
    return [Finding("gpu", line.strip()) for line in answer.stdout.splitlines()]
