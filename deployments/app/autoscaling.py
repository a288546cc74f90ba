"""Ray Serve autoscaling policies based on threads, KV cache and waiting requests.

Replicas report their load and gateways their queue lengths; `deployments.autoscaling.decide` makes
the decision. Both policies run in the Serve controller.
"""

import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import ray
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

# Imported as a module: Ray pickles a policy's module by value with the objects it imports, but
# modules by reference. So both policies find the same board.
from deployments.app import waiting_board
from deployments.autoscaling import ModelLoad, ReplicaReport, ScalingState, decide
from deployments.config import ClusterConfig
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.model import ModelConfig

WAITING_PREFIX = "waiting:"
"""Prefix of a deployment's name in a gateway's report."""

_REPORT_PERIOD_S = 1.0
# A gateway notices within this time that its reports are read.
_UNREAD_REPORT_PERIOD_S = 10.0
_MEAN_OVER_PERIODS = 3.0
# The number of nodes is asked for at most this often; the answer comes from Ray's global store.
_NODES_AGE_S = 5.0
_MAX_NODES = 1000
_REPORT_FIELDS = tuple(field.name for field in fields(ReplicaReport))


def gateway_report(waiting: Mapping[str, int]) -> dict[str, float]:
    """Report a gateway's waiting requests by deployment."""
    return {WAITING_PREFIX + deployment: float(count) for deployment, count in waiting.items()}


class GatewayPolicy:
    """Copies the gateways' waiting requests to the board.

    The number of gateways stays as it is or, with `per_node`, follows the number of nodes; with
    `resource`, only of those that have this Ray resource.
    """

    def __init__(self, *, per_node: bool = False, resource: str | None = None) -> None:
        self._per_node = per_node
        self._resource = resource
        self._looked_s = float("-inf")
        self._num_nodes = 0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of gateways to run."""
        metrics = context.aggregated_metrics or {}
        waiting = {
            name.removeprefix(WAITING_PREFIX): sum(by_replica.values())
            for name, by_replica in metrics.items()
            if name.startswith(WAITING_PREFIX)
        }
        now_s = time.monotonic()
        waiting_board.BOARD.write(waiting, now_s)
        if not self._per_node:
            return context.target_num_replicas, {}
        if now_s - self._looked_s >= _NODES_AGE_S:
            self._looked_s, self._num_nodes = now_s, num_nodes(ray.nodes(), self._resource)
        return self._num_nodes or context.target_num_replicas, {}


def num_nodes(nodes: Iterable[Mapping[str, Any]], resource: str | None) -> int:
    """Count the living nodes of `ray.nodes()` that have a resource, or all."""
    return sum(
        bool(node["Alive"]) and (resource is None or node["Resources"].get(resource, 0) > 0)
        for node in nodes
    )


class ModelPolicy:
    """Asks for the number of replicas that a model's load needs."""

    def __init__(
        self, settings: dict[str, Any], target_threads: float, default_threads: float
    ) -> None:
        self._settings = AutoscalingConfig.model_validate(settings)
        self._target_threads = target_threads
        self._default_threads = default_threads
        self._state = ScalingState()

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas to run now."""
        now_s = time.monotonic()
        metrics = context.aggregated_metrics or {}
        reported = set.intersection(*(set(metrics.get(name, {})) for name in _REPORT_FIELDS))
        waiting_in_gateways = waiting_board.BOARD.read(context.deployment_name, now_s)
        load = ModelLoad(
            replicas=[
                ReplicaReport(**{name: metrics[name][replica] for name in _REPORT_FIELDS})
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
    """Return Ray Serve's autoscaling configuration of a model; None for fixed replicas."""
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


def gateway_autoscaling(
    config: ClusterConfig, resource: str | None = None
) -> ServeAutoscalingConfig:
    """Return Ray Serve's autoscaling configuration of the gateways.

    A fixed number of gateways has one, too, so that they report their queues. Without a model that
    scales, nothing reads the reports, so they are rare. Ray Serve cannot stop them: a gateway whose
    configuration is removed logs an error for each.
    """
    scales = any(model.autoscaling is not None for model in config.models)
    period_s = _REPORT_PERIOD_S if scales else _UNREAD_REPORT_PERIOD_S
    gateways = config.gateways
    per_node = not isinstance(gateways, int)
    arguments = {"per_node": per_node, "resource": resource}
    policy = AutoscalingPolicy(policy_function=GatewayPolicy, policy_kwargs=arguments)
    if isinstance(gateways, int):
        return _serve_config(gateways, gateways, policy, period_s)
    return _serve_config(1, _MAX_NODES, policy, period_s)


def _serve_config(
    least: int, most: int, policy: AutoscalingPolicy, period_s: float = _REPORT_PERIOD_S
) -> ServeAutoscalingConfig:
    with warnings.catch_warnings():
        # Deprecated in favour of environment variables, which a running Ray cluster lacks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ServeAutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            policy=policy,
            metrics_interval_s=period_s,
            look_back_period_s=_MEAN_OVER_PERIODS * period_s,
            # `decide` has its own delays, which a simulation can drive.
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
        )
