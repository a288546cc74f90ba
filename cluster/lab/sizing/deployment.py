"""Configuration for a plan: the cluster's YAML, and parameters of a Kubernetes overlay."""

from __future__ import annotations

import math
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.lab.sizing.errors import SizingError
from cluster.lab.sizing.plan import Plan
from cluster.lab.sizing.settings import PlanSettings
from deployments.config import ClusterConfig, problems_of
from deployments.config.model import MAX_THREADS

# Host memory of an engine pod besides weights and KV cache. Without a GPU: Python, torch, and the
# processes of vLLM and Ray, 2 to 2.5 GiB for a small model. With a GPU: an assumption for the CUDA
# context, pinned buffers, compiled kernels and Ray's object store.
_HOST_CPU_GIB = 4
_HOST_GPU_GIB = 24
_LIMIT_GIB = 8
# vLLM's advice: two busy processes, and one per GPU.
_BUSY_PROCESSES = 2


GIB = 2**30
# Checkpoints with the shapes of known models that have no weights.
_CHECKPOINTS = {"llama-7b": "apar-7b", "llama-13b": "apar-13b"}


def cluster_yaml(plan: Plan, settings: PlanSettings) -> str:
    """Return the `models` section of a configuration file, validated by `ClusterConfig`.

    Raises SizingError if it is invalid.
    """
    model = _model(plan, settings)
    text = yaml.safe_dump({"models": [model]}, sort_keys=False)
    try:
        ClusterConfig.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        raise SizingError(f"the plan's configuration is invalid: {problems_of(error)}") from error
    return text


def _model(plan: Plan, settings: PlanSettings) -> dict[str, Any]:
    cap, run = plan.best.found.candidate.cap, plan.best.run
    kv_gib = plan.hardware.kv_tokens * settings.size.kv_bytes_per_token / GIB
    model: dict[str, Any] = {"checkpoint": _CHECKPOINTS.get(settings.model, settings.model)}
    if settings.min_replicas is None:
        model["replicas"] = plan.num_replicas
    else:
        model["autoscaling"] = {
            "min_replicas": min(settings.min_replicas, plan.num_replicas),
            "max_replicas": plan.num_replicas,
            "target_threads": max(1, round(run.rows)),
            "target_kv_use": round(min(max(run.kv_use, 0.05), 1.0), 2),
        }
    if settings.tensor_parallel > 1:
        model["gpus_per_replica"] = settings.tensor_parallel
    if settings.memory_share is not None:
        model["gpu_memory_share"] = settings.memory_share
    else:
        model["kv_cache_gib"] = round(kv_gib, 3)
    model["max_concurrency"] = cap
    # `max_num_seqs` becomes the cap times this, rounded up.
    peak_rows = max(run.peak_rows, plan.best.found.saturated.run.peak_rows)
    threads = min(MAX_THREADS, max(cap, peak_rows))
    model["threads_per_request"] = math.ceil(1000 * threads / cap) / 1000
    if (family := plan.hardware.family) is not None:
        model["attention"] = "family"
        model["family"] = {"min_saved_blocks": family.min_saved_blocks}
    engine = {"max_model_len": settings.max_model_len, "block_size": settings.block_size}
    if engine := {name: value for name, value in engine.items() if value is not None}:
        model["engine"] = engine
    return model


def overlay_values(plan: Plan, settings: PlanSettings) -> dict[str, Any]:
    """Return the values of a Kubernetes overlay's parameters.env: one replica per engine pod.

    With autoscaler bounds there are pods for the minimum, and components/autoscaling adds pods up
    to the maximum.
    """
    has_gpu = settings.memory_share is not None
    kv_gib = plan.hardware.kv_tokens * settings.size.kv_bytes_per_token / GIB
    weights_gib = settings.size.weight_bytes / GIB
    if has_gpu:
        # During loading, the checkpoint's files are in the page cache, which counts as pod memory.
        memory_gib = _HOST_GPU_GIB + math.ceil(weights_gib)
    else:
        memory_gib = _HOST_CPU_GIB + math.ceil(weights_gib + kv_gib)
    least = plan.num_replicas if settings.min_replicas is None else settings.min_replicas
    pods = min(least, plan.num_replicas)
    values: dict[str, Any] = {
        "pods": pods,
        "max-pods": plan.num_replicas,
        # At least one pod may be evicted, or no node could be drained.
        "available-pods": max(1, min(plan.num_serving, pods - 1)),
        "cpu": _BUSY_PROCESSES + settings.tensor_parallel,
        "memory": f"{memory_gib + _LIMIT_GIB}Gi",
    }
    if has_gpu:
        values["gpus"] = settings.tensor_parallel
    return values
