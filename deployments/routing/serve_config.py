"""Ray Serve's configuration of a deployment whose requests our router places."""

from ray.serve.config import RequestRouterConfig

from cluster.config.routing import RoutingSettings

ROUTER_CLASS = "deployments.routing.ray_router.ThreadRequestRouter"
# The gateway lets in as many requests as there is room for, so a full replica is a matter of
# moments; Ray Serve's own longest wait of 0.5 s would be felt.
_MAX_WAIT_S = 0.1


def router_config(settings: RoutingSettings) -> RequestRouterConfig:
    """The router of a model's replicas, and how often they report to it."""
    return RequestRouterConfig.model_validate(
        {
            "request_router_class": ROUTER_CLASS,
            "request_router_kwargs": settings.model_dump(mode="json"),
            "request_routing_stats_period_s": settings.report_period_s,
            "max_backoff_s": _MAX_WAIT_S,
        }
    )
