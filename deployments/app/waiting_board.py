"""Waiting requests of each model, shared by the autoscaling policies in the Serve controller.

Ray Serve runs the policies of all deployments in one process but shows each only its own
deployment's metrics. The gateway's policy writes here and the models' policies read. This must stay
a module of its own: Ray pickles a policy's module by value, which would copy the board as well.
"""

from dataclasses import dataclass, field

MAX_AGE_S = 10.0


@dataclass(slots=True)
class WaitingBoard:
    """Latest number of waiting requests by deployment; entries expire after `MAX_AGE_S`."""

    _entries: dict[str, tuple[float, float]] = field(default_factory=dict)

    def write(self, waiting: dict[str, float], now_s: float) -> None:
        """Set the requests that wait in all gateways together, by deployment."""
        for deployment, requests in waiting.items():
            self._entries[deployment] = (requests, now_s)

    def read(self, deployment: str, now_s: float) -> float:
        """Return the number of requests that wait in the gateways for a deployment."""
        requests, written_s = self._entries.get(deployment, (0.0, 0.0))
        return requests if now_s - written_s <= MAX_AGE_S else 0.0


BOARD = WaitingBoard()
"""The board of this process."""
