"""Waiting work of each model, as the gateways' replicas report it to the Serve controller.

Ray Serve runs the autoscaling policies of all deployments in one process, but shows each only its
own deployment's numbers. The policy of the gateway writes here what those of the models read. A
module of its own, because Ray copies a policy's module by value, and the board with it.
"""

from dataclasses import dataclass, field

MAX_AGE_S = 10.0


@dataclass(slots=True)
class WaitingBoard:
    """The latest waiting requests by deployment; older entries are as good as none."""

    _entries: dict[str, tuple[float, float]] = field(default_factory=dict)

    def write(self, waiting: dict[str, float], now_s: float) -> None:
        """Note the requests that wait in all gateways together, by deployment."""
        for deployment, requests in waiting.items():
            self._entries[deployment] = (requests, now_s)

    def read(self, deployment: str, now_s: float) -> float:
        """Requests that wait for the deployment in the gateways."""
        requests, written_s = self._entries.get(deployment, (0.0, 0.0))
        return requests if now_s - written_s <= MAX_AGE_S else 0.0


BOARD = WaitingBoard()
"""The board of this process."""
