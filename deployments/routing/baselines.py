"""The usual ways to choose a replica, to compare ours with; and the choice among them all."""

import numpy as np
from numpy.typing import NDArray

from cluster.config.routing import RoutingPolicy, RoutingSettings
from deployments.routing.policy import Reason, Router, ThreadRouter
from deployments.wire.request import RequestHint


class RoundRobin(Router):
    """The replicas in turn, those at their cap left out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._last = -1

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        index = int(np.searchsorted(open_slots, self._last, side="right")) % len(open_slots)
        self._last = int(open_slots[index])
        return self._last, Reason.LEAST_LOAD


class RandomChoice(Router):
    """Any replica with room."""

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        return int(self._random.choice(open_slots)), Reason.LEAST_LOAD


class FewestRequests(Router):
    """The replica with the fewest requests; equal ones by chance."""

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        requests = self.table.requests[open_slots]
        fewest = open_slots[requests == requests.min()]
        return int(self._random.choice(fewest)), Reason.LEAST_LOAD


class PowerOfTwo(Router):
    """The one of two random replicas that has fewer requests: Ray Serve's own way."""

    def _pick(self, hint: RequestHint, open_slots: NDArray[np.intp]) -> tuple[int, Reason]:
        first, second = self._random.choice(open_slots, 2, replace=False)
        requests = self.table.requests
        return int(first if requests[first] <= requests[second] else second), Reason.LEAST_LOAD


_BASELINES: dict[RoutingPolicy, type[Router]] = {
    RoutingPolicy.ROUND_ROBIN: RoundRobin,
    RoutingPolicy.RANDOM: RandomChoice,
    RoutingPolicy.FEWEST_REQUESTS: FewestRequests,
    RoutingPolicy.POWER_OF_TWO: PowerOfTwo,
}


def build_router(settings: RoutingSettings, seed: int = 0) -> Router:
    """The router that the settings ask for; equal seeds choose equally."""
    if settings.policy is RoutingPolicy.THREADS:
        return ThreadRouter(settings, seed)
    return _BASELINES[settings.policy](seed)
