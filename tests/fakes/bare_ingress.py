"""The gateway's deployment class without Ray Serve's wrapper."""

from typing import Any

from deployments.app.ingress import GatewayIngress

# `serve.ingress` returns a wrapper that must run inside Ray Serve; our class is its base.
_INGRESS: Any = GatewayIngress.__mro__[1]


class BareIngress(_INGRESS):  # type: ignore[misc] # The base has no static type.
    """`GatewayIngress` that a test can create by itself."""

    def __del__(self) -> None:
        """Do nothing; only Ray Serve awaits the coroutine of the base class."""
