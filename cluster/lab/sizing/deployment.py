"""A plan as settings: the cluster's YAML, and the parameters of a Kubernetes overlay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.lab.sizing.errors import SizingError
from cluster.lab.sizing.plan import Plan
from deployments.config import ClusterConfig, problems_of
from deployments.config.model import MAX_THREADS

# Of an engine's pod beside weights and KV cache: Python, torch, vLLM's and Ray's processes, 2 to
# 2.5 GiB for a small model without a GPU. With one, CUDA's context, pinned buffers, compiled
# kernels and Ray's object store are assumed.
_HOST_CPU_GIB = 4
_HOST_GPU_GIB = 24
_LIMIT_GIB = 8
# vLLM's own advice: two busy processes, and one per GPU.
_BUSY_PROCESSES = 2


GIB = 2**30
# Checkpoints that have the shape of a known model without weights.
_CHECKPOINTS = {"llama-7b": "apar-7b", "llama-13b": "apar-13b"}


@dataclass(frozen=True, slots=True)
class Served:
    """The model as the configuration names it, and its engines.

    gpu_memory_share is None on a CPU. kv_bytes: of the KV cache of a replica. block_size: tokens of
    a KV block; None: the engine's default.
    """

    model: str
    tensor_parallel: int
    gpu_memory_share: float | None
    weight_bytes: float
    kv_bytes: float
    max_model_len: int | None = None
    block_size: int | None = None
    min_replicas: int | None = None


def cluster_yaml(plan: Plan, served: Served) -> str:
    """Return the `models` of a configuration file, read back by our own configuration.

    Raises SizingError if that refuses it.
    """
    model = _model(plan, served)
    text = yaml.safe_dump({"models": [model]}, sort_keys=False)
    try:
        ClusterConfig.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        raise SizingError(f"the plan is no valid configuration: {problems_of(error)}") from error
    return text


def _model(plan: Plan, served: Served) -> dict[str, Any]:
    cap, run = plan.best.found.candidate.cap, plan.best.run
    model: dict[str, Any] = {"checkpoint": _CHECKPOINTS.get(served.model, served.model)}
    if served.min_replicas is None:
        model["replicas"] = plan.num_replicas
    else:
        model["autoscaling"] = {
            "min_replicas": min(served.min_replicas, plan.num_replicas),
            "max_replicas": plan.num_replicas,
            "target_threads": max(1, round(run.rows)),
            "target_kv_use": round(min(max(run.kv_use, 0.05), 1.0), 2),
        }
    if served.tensor_parallel > 1:
        model["gpus_per_replica"] = served.tensor_parallel
    if served.gpu_memory_share is not None:
        model["gpu_memory_share"] = served.gpu_memory_share
    else:
        model["kv_cache_gib"] = round(served.kv_bytes / GIB, 3)
    model["max_concurrency"] = cap
    # `max_num_seqs` comes out as the cap times this, rounded up.
    peak_rows = max(run.peak_rows, plan.best.found.saturated.run.peak_rows)
    threads = min(MAX_THREADS, max(cap, peak_rows))
    model["threads_per_request"] = math.ceil(1000 * threads / cap) / 1000
    if (family := plan.hardware.family) is not None:
        model["attention"] = "family"
        model["family"] = {"min_saved_blocks": family.min_saved_blocks}
    engine = {"max_model_len": served.max_model_len, "block_size": served.block_size}
    if engine := {name: value for name, value in engine.items() if value is not None}:
        model["engine"] = engine
    return model


def overlay_values(plan: Plan, served: Served) -> dict[str, Any]:
    """Return the parameters.env of a Kubernetes overlay: engine pods with one replica each.

    With bounds for the autoscaler there are pods for the minimum, and components/autoscaling adds
    pods up to the maximum.
    """
    has_gpu = served.gpu_memory_share is not None
    weights_gib = served.weight_bytes / GIB
    if has_gpu:
        # While it loads, a checkpoint's files lie in the page cache, which counts too.
        memory_gib = _HOST_GPU_GIB + math.ceil(weights_gib)
    else:
        memory_gib = _HOST_CPU_GIB + math.ceil(weights_gib + served.kv_bytes / GIB)
    least = plan.num_replicas if served.min_replicas is None else served.min_replicas
    pods = min(least, plan.num_replicas)
    values: dict[str, Any] = {
        "pods": pods,
        "max-pods": plan.num_replicas,
        # One at least may go, or no node could be drained.
        "available-pods": max(1, min(plan.num_serving, pods - 1)),
        "cpu": _BUSY_PROCESSES + served.tensor_parallel,
        "memory": f"{memory_gib + _LIMIT_GIB}Gi",
    }
    if has_gpu:
        values["gpus"] = served.tensor_parallel
    return values
