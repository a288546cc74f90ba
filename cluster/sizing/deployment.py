"""A plan as settings: the cluster's YAML, and the values of a Kubernetes overlay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.config import ClusterConfig, problems_of
from cluster.sizing.errors import SizingError
from cluster.sizing.memory import GIB
from cluster.sizing.plan import Plan

# Of an engine's pod beside weights and KV cache: Python, torch, vLLM's and Ray's processes, 2 to
# 2.5 GiB for a small model without a GPU. With one, CUDA's context, pinned buffers, compiled
# kernels and Ray's object store are assumed.
_HOST_CPU_GIB = 4
_HOST_GPU_GIB = 24
_LIMIT_GIB = 8
# vLLM's own advice: two busy processes, and one per GPU.
_BUSY_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Served:
    """What the plan is for: the model as the configuration names it, and its engines.

    Without a GPU `gpu_utilisation` is None and `kv_cache_gib` sizes the KV cache.
    """

    checkpoint: str
    tensor_parallel: int
    gpu_utilisation: float | None
    kv_cache_gib: float | None = None
    max_model_len: int | None = None
    min_replicas: int | None = None


def cluster_yaml(plan: Plan, served: Served) -> str:
    """The `models` of a configuration file, read back by our own configuration.

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
    cap = plan.caps.requests
    model: dict[str, Any] = {"checkpoint": served.checkpoint}
    if served.min_replicas is None:
        model["replicas"] = plan.replicas
    else:
        model["autoscaling"] = {
            "min_replicas": min(served.min_replicas, plan.replicas),
            "max_replicas": plan.replicas,
            "target_threads": max(1, round(plan.most.requests * plan.shape.alive_threads)),
            "target_kv_use": round(min(max(plan.most_kv_share, 0.05), 1.0), 2),
        }
    if served.tensor_parallel > 1:
        model["gpus_per_replica"] = served.tensor_parallel
    if served.gpu_utilisation is not None:
        model["gpu_memory_share"] = served.gpu_utilisation
    if served.kv_cache_gib is not None:
        model["kv_cache_gib"] = served.kv_cache_gib
    model["max_concurrency"] = cap
    # `max_num_seqs` comes out as the cap times this, rounded up.
    model["threads_per_request"] = math.ceil(1000 * plan.threads / cap) / 1000
    model["forks"] = {"max_replica_threads": plan.threads}
    if served.max_model_len is not None:
        model["engine"] = {"max_model_len": served.max_model_len}
    return model


def overlay_values(plan: Plan, served: Served) -> dict[str, Any]:
    """What a Kubernetes overlay takes: engine pods, one replica each, and what each asks for.

    As many pods as there may be replicas: our overlays let nothing but us change their number.
    """
    gpu = served.gpu_utilisation is not None
    weights_gib = plan.memory.weight_bytes * served.tensor_parallel / GIB
    if gpu:
        # While it loads, a checkpoint's files lie in the page cache, which counts too.
        request_gib = _HOST_GPU_GIB + math.ceil(weights_gib)
    else:
        request_gib = _HOST_CPU_GIB + math.ceil(weights_gib + plan.memory.kv_bytes / GIB)
    cpus = _BUSY_PROCESSES + served.tensor_parallel
    values: dict[str, Any] = {
        "workerGroupSpecs/0/replicas": plan.replicas,
        "workerGroupSpecs/0/minReplicas": plan.replicas,
        "workerGroupSpecs/0/maxReplicas": plan.replicas,
        # One at least may go, or no node could be drained.
        "PodDisruptionBudget apar-engines minAvailable": max(
            1, min(plan.serving_replicas, plan.replicas - 1)
        ),
        "resources.requests.cpu": str(cpus),
        "resources.requests.memory": f"{request_gib}Gi",
        "resources.limits.memory": f"{request_gib + _LIMIT_GIB}Gi",
    }
    if gpu:
        values["resources.limits.nvidia.com/gpu"] = str(served.tensor_parallel)
    return values
