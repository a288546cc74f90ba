"""OpenTelemetry traces: one of each request, from the gateway to the threads in its engine.

The gateway makes the spans of the whole request, of its wait and of each attempt at a replica, and
sends the attempt's context along in the request's terms. The replica watches the threads of the
request, and makes the engine's spans when it ends there. OpenTelemetry's SDK is imported only
where tracing is on.
"""

from deployments.gateway.gateway_trace import start_trace
from deployments.replica.engine_trace import engine_trace
from deployments.tracing.tracing import (
    GATEWAY,
    REPLICA,
    Tracing,
    close_tracing,
    open_tracing,
    reopened,
)

__all__ = [
    "GATEWAY",
    "REPLICA",
    "Tracing",
    "close_tracing",
    "engine_trace",
    "open_tracing",
    "reopened",
    "start_trace",
]
