"""Ray Serve's autoscaling by threads, KV cache and waiting work.

Replicas report what they carry, gateways how many requests wait for each model; the decision is
`cluster.autoscaling.decide`. Both policies run in the Serve controller.
"""

import time
import warnings
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from cluster.autoscaling import ModelLoad, ReplicaReport, ScalingState, decide
from cluster.config.autoscaling import AutoscalingConfig
from cluster.config.model import ModelConfig

# The module and not the board in it: Ray copies what this module refers to, but modules.
from deployments.app import waiting_board

WAITING_PREFIX = "waiting:"
"""Before a deployment's name in what a gateway reports."""

_REPORT_PERIOD_S = 1.0
_MEAN_OVER_S = 3.0
_FIELDS = ("requests", "threads", "waiting_forks", "kv_use")


def replica_report(state: Mapping[str, Any], requests: int) -> dict[str, float]:
    """What a replica reports, of its engine core's state and the requests on its HTTP side."""
    blocks = state["kv_blocks"]
    return {
        "requests": float(requests),
        "threads": float(state["threads"]),
        "waiting_forks": float(state.get("deferred_threads", 0)),
        "kv_use": 1 - state["free_blocks"] / blocks if blocks else 0.0,
    }


def gateway_report(waiting: Mapping[str, int]) -> dict[str, float]:
    """What a gateway reports: requests that wait in it, by the deployment they wait for."""
    return {WAITING_PREFIX + deployment: float(count) for deployment, count in waiting.items()}


class GatewayPolicy:
    """Puts the gateways' waiting requests on the board; leaves their own number as it is."""

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The unchanged number of gateways."""
        metrics = context.aggregated_metrics or {}
        waiting = {
            name.removeprefix(WAITING_PREFIX): sum(by_replica.values())
            for name, by_replica in metrics.items()
            if name.startswith(WAITING_PREFIX)
        }
        waiting_board.BOARD.write(waiting, time.monotonic())
        return context.target_num_replicas, {}


class ModelPolicy:
    """Asks for the replicas that a model's load needs."""

    def __init__(
        self, settings: dict[str, Any], target_threads: float, default_threads: float
    ) -> None:
        self._settings = AutoscalingConfig.model_validate(settings)
        self._target_threads = target_threads
        self._default_threads = default_threads
        self._state = ScalingState()

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The replicas to ask for now."""
        now_s = time.monotonic()
        metrics = context.aggregated_metrics or {}
        reported = set.intersection(*(set(metrics.get(name, {})) for name in _FIELDS))
        waiting_in_gateways = waiting_board.BOARD.read(context.deployment_name, now_s)
        load = ModelLoad(
            replicas=[
                ReplicaReport(**{name: metrics[name][replica] for name in _FIELDS})
                for replica in reported
            ],
            waiting_requests=waiting_in_gateways + (context.total_queued_requests or 0.0),
            default_threads=self._default_threads,
            running=context.current_num_replicas,
            target=context.target_num_replicas,
        )
        wanted, self._state = decide(load, self._settings, self._target_threads, self._state, now_s)
        return wanted, {}


def model_autoscaling(model: ModelConfig) -> ServeAutoscalingConfig | None:
    """Ray Serve's settings for the replicas of a model; None where their number is fixed."""
    settings = model.autoscaling
    if settings is None:
        return None
    arguments = {
        "settings": settings.model_dump(mode="json"),
        "target_threads": model.target_threads,
        "default_threads": model.threads_per_request,
    }
    policy = AutoscalingPolicy(policy_function=ModelPolicy, policy_kwargs=arguments)
    return _serve_config(settings.min_replicas, settings.max_replicas, policy)


def gateway_autoscaling(num_gateways: int) -> ServeAutoscalingConfig:
    """Ray Serve's settings for gateways whose waiting requests count."""
    policy = AutoscalingPolicy(policy_function=GatewayPolicy)
    return _serve_config(num_gateways, num_gateways, policy)


def _serve_config(least: int, most: int, policy: AutoscalingPolicy) -> ServeAutoscalingConfig:
    with warnings.catch_warnings():
        # The period has environment variables instead, which a running Ray cluster has not got.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ServeAutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            policy=policy,
            metrics_interval_s=_REPORT_PERIOD_S,
            look_back_period_s=_MEAN_OVER_S,
            # `decide` has delays of its own, which a simulation can drive.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
        )
