"""Our choice of a replica as a Ray Serve request router.

Ray Serve makes one for each handle, hands it every request with its arguments, and tells it what
runs and what has ended. The choice itself is the shared router of the deployment in this process.
"""

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any
from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter
from cluster.config.routing import RoutingSettings
from deployments.routing import shared_router as registry
from deployments.replica.replica import load_from
from deployments.wire.request import RelayedRequest, RequestHint
from ray.serve.config import RequestRouterConfig


# While all are full, Ray Serve asks so many replicas how long their queues really are.
_ASKED_WHEN_FULL = 2
# A number for each of Ray's routers; an id may come again when its object is gone.
_sources = itertools.count()


@dataclass(slots=True)
class _Waiting:
    """A request that has been offered to replicas, and has none yet."""

    pending: PendingRequest
    request_id: str
    picked: str | None = None
    tried: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Sent:
    """A request at a replica; more than one call where it was refused there before."""

    request_id: str
    num_calls: int = 0


class ThreadRequestRouter(FIFOMixin, RequestRouter):
    """Routes a model's requests to its replicas by the settings in `request_router_kwargs`.

    A request is counted at the replica in the moment it is picked: the confirmation that Ray
    Serve gives later would come too late for a burst.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Join the deployment's shared router; the settings are those of `RoutingSettings`."""
        self._shared = registry.PROCESS.router(
            self._deployment_id.name, RoutingSettings.model_validate(settings)
        )
        self._source = next(_sources)
        # Ray Serve says nothing when it drops a router, as it does with a handle.
        weakref.finalize(self, self._shared.left, self._source).atexit = False
        # Both by Ray Serve's id of a request, which it keeps when it is tried again elsewhere.
        self._waiting: dict[str, _Waiting] = {}
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._asked = 0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take what runs now, and the reports that come with it."""
        self._shared.replicas_changed(
            self._source, {r.replica_id.unique_id: r.max_ongoing_requests for r in replicas}
        )
        for replica in replicas:
            if (load := load_from(replica.routing_stats)) is not None:
                self._shared.reported(replica.replica_id.unique_id, load)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call has found the replica dead, before the controller said so."""
        super().on_replica_actor_died(replica_id)
        self._shared.died(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica for a request; while all are full, some of them, to be asked."""
        if pending_request is None:
            return [candidate_replicas]
        # Without this Ray Serve would try again at once, for ever, and freeze its process.
        pending_request.routing_context.should_backoff = True
        chosen = self._pick(pending_request)
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == chosen:
                return [[replica]]
        self._asked = (self._asked + 1) % max(len(candidate_replicas), 1)
        turned = candidate_replicas[self._asked :] + candidate_replicas[: self._asked]
        return [turned[:_ASKED_WHEN_FULL]]

    def _pick(self, pending_request: PendingRequest) -> str | None:
        """The next replica to try: Ray Serve asks again when one does not answer."""
        request_id, hint = _identity(pending_request)
        waiting = self._waiting.setdefault(
            pending_request.metadata.internal_request_id, _Waiting(pending_request, request_id)
        )
        chosen = waiting.picked = self._shared.pick(request_id, hint, waiting.tried)
        if chosen is not None:
            if chosen in waiting.tried:  # All others have been tried, or are full: begin anew.
                waiting.tried.clear()
            waiting.tried.add(chosen)
        return chosen

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """The oldest request goes to a replica, which may have been picked for a younger one."""
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
        """Count the request where it really goes, which need not be where it was picked.

        A request that a replica has refused may get the next place that anybody finds, without
        having been offered one itself.
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
        """A request has left its replica: it ended, was refused there, or the replica died.

        Of a refused call Ray Serve may tell when the request is at the same replica again.
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
    """The request's id and hint; calls of other kinds have Ray Serve's id and say nothing."""
    for argument in (*pending_request.args, *pending_request.kwargs.values()):
        if isinstance(argument, RelayedRequest):
            request_id = argument.terms.request_id
            return request_id or pending_request.metadata.internal_request_id, argument.hint
    return pending_request.metadata.internal_request_id, RequestHint()


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
