"""Adapter between Ray Serve's request router and the deployment's shared router.

Ray Serve creates a `ThreadRequestRouter` for each handle and passes it every request with its
arguments. Ray Serve also tells it which replicas run and which requests have ended.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter
from ray.serve.config import RequestRouterConfig

from deployments.config.routing import RoutingSettings

# Ray pickles this module by value, with the objects it imports. A module is pickled by reference,
# so that all handles in a process find the same ROUTERS.
from deployments.routing import shared_router
from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RelayedRequest, RequestHint

# Number of replicas whose queue length Ray Serve asks for while all are full.
_ASKED_WHEN_FULL = 2
# Ray's longest wait between two attempts to place a request. The gateway admits only as many
# requests as there is room for, so a full replica is soon free; Ray's own 0.5 s would be noticed.
_MAX_BACKOFF_S = 0.1


# With a single replica, no choice depends on its load; each report is a call into its engine.
_LONE_REPORT_PERIOD_S = 2.0


def router_config(settings: RoutingSettings, *, is_lone: bool = False) -> RequestRouterConfig:
    """Return Ray Serve's routing configuration for a model's replicas, or for its only one."""
    least_s = _LONE_REPORT_PERIOD_S if is_lone else 0.0
    return RequestRouterConfig.model_validate(
        {
            "request_router_class": f"{__name__}.{ThreadRequestRouter.__name__}",
            "request_router_kwargs": settings.model_dump(mode="json"),
            "request_routing_stats_period_s": max(settings.report_period_s, least_s),
            "max_backoff_s": _MAX_BACKOFF_S,
        }
    )


@dataclass(slots=True)
class _Waiting:
    """A request that has been offered to replicas and has none yet."""

    pending: PendingRequest
    request_id: str
    picked: str | None = None
    tried: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Sent:
    """A request at a replica; several calls if the replica refused it before."""

    request_id: str
    num_calls: int = 0


class ThreadRequestRouter(FIFOMixin, RequestRouter):
    """Ray Serve router of a model's replicas; `request_router_kwargs` are `RoutingSettings`.

    A request is counted at its replica as soon as it is picked. Ray Serve's own confirmation
    comes too late for a burst.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Join the deployment's shared router; called by Ray Serve."""
        self._shared = shared_router.ROUTERS.router(
            self._deployment_id.name, RoutingSettings.model_validate(settings)
        )
        self._source = object()
        # Ray Serve does not announce that it drops a router, together with its handle.
        weakref.finalize(self, self._shared.left, self._source).atexit = False
        # Both by Ray Serve's id of a request, which stays the same on a retry.
        self._waiting: dict[str, _Waiting] = {}
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._asked = 0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the running replicas, and the load reports that come with them."""
        self._shared.replicas_changed(
            self._source, {r.replica_id.unique_id: r.max_ongoing_requests for r in replicas}
        )
        for replica in replicas:
            if (load := ReplicaLoad.from_stats(replica.routing_stats)) is not None:
                self._shared.reported(replica.replica_id.unique_id, load)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Exclude a replica that a call found dead, before the controller announces it."""
        super().on_replica_actor_died(replica_id)
        self._shared.died(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request; while all are full, some to ask for queue lengths."""
        if pending_request is None:
            return [candidate_replicas]
        # Without this Ray Serve would retry in a busy loop and freeze its process.
        pending_request.routing_context.should_backoff = True
        chosen = self._pick(pending_request)
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == chosen:
                return [[replica]]
        self._asked = (self._asked + 1) % max(len(candidate_replicas), 1)
        turned = candidate_replicas[self._asked :] + candidate_replicas[: self._asked]
        return [turned[:_ASKED_WHEN_FULL]]

    def _pick(self, pending_request: PendingRequest) -> str | None:
        """Pick the next replica to try; Ray Serve asks again if one does not answer."""
        request_id, hint = _identity(pending_request)
        waiting = self._waiting.setdefault(
            pending_request.metadata.internal_request_id, _Waiting(pending_request, request_id)
        )
        chosen = waiting.picked = self._shared.assign(request_id, hint, waiting.tried)
        if chosen is not None:
            if chosen in waiting.tried:  # All others have been tried or are full: start over.
                waiting.tried.clear()
            waiting.tried.add(chosen)
        return chosen

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """Give the replica to the oldest request, even if it was picked for a younger one."""
        super()._fulfill_next_pending_request(replica, request_metadata)
        finder = request_metadata and self._waiting.get(request_metadata.internal_request_id)
        if finder and finder.picked and not finder.pending.future.done():
            finder.tried.discard(finder.picked)
            self._unpick(finder)

    def _unpick(self, waiting: _Waiting) -> None:
        if waiting.picked is not None:
            self._shared.released(waiting.request_id, waiting.picked)
            waiting.picked = None

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Count the request at the replica it actually goes to, which may not be the picked one.

        A request that a replica refused may get a replica found for another request.
        """
        internal_id = pending_request.metadata.internal_request_id
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            if waiting := self._waiting.pop(internal_id, None):
                self._unpick(waiting)
            raise
        self._waiting.pop(internal_id, None)
        request_id, hint = _identity(pending_request)
        name = replica.replica_id.unique_id
        self._shared.moved(request_id, name, hint)
        self._sent.setdefault((internal_id, name), _Sent(request_id)).num_calls += 1
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Release a request that ended, was refused, or lost its replica.

        Ray Serve may report a refused call when the request is already back at the same replica.
        """
        name = replica_id.unique_id
        sent = self._sent.get((internal_request_id, name))
        if sent is None:
            return
        sent.num_calls -= 1
        if sent.num_calls == 0:
            del self._sent[internal_request_id, name]
            if internal_request_id not in self._waiting:
                self._shared.released(sent.request_id, name)


def _identity(pending_request: PendingRequest) -> tuple[str, RequestHint]:
    """Return the request's id and hint; for other calls, Ray Serve's id and an empty hint."""
    for argument in (*pending_request.args, *pending_request.kwargs.values()):
        if isinstance(argument, RelayedRequest):
            request_id = argument.terms.request_id
            return request_id or pending_request.metadata.internal_request_id, argument.hint
    return pending_request.metadata.internal_request_id, RequestHint()
