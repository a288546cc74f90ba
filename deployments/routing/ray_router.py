"""Our choice of a replica as a Ray Serve request router.

Ray Serve makes one for each handle, hands it every request with its arguments, and tells it what
runs and what has ended. The choice itself is the shared router of the deployment in this process.
"""

import asyncio
import itertools
import weakref
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter

from cluster.routing_config import RoutingSettings
from deployments.asgi_relay import RelayedRequest
from deployments.routing import registry
from deployments.routing.load_report import load_from
from deployments.routing.views import RequestHint

# While all are full, Ray Serve asks so many replicas how long their queues really are.
_ASKED_WHEN_FULL = 2
# A number for each of Ray's routers; an id may come again when its object is gone.
_sources = itertools.count()


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
        # Our id of each request, by Ray Serve's and the replica: a request that is tried again
        # elsewhere keeps both of its ids.
        self._request_ids: dict[tuple[str, str], str] = {}
        # Replicas that a request which has none yet has been offered, by Ray Serve's id of it.
        self._tried: dict[str, set[str]] = {}
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
        request_id, hint = _identity(pending_request)
        internal_id = pending_request.metadata.internal_request_id
        chosen = self._pick(internal_id, request_id, hint)
        pending_request.future.add_done_callback(
            lambda future: self._settled(internal_id, request_id, hint, chosen, future)
        )
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == chosen:
                return [[replica]]
        self._asked = (self._asked + 1) % max(len(candidate_replicas), 1)
        turned = candidate_replicas[self._asked :] + candidate_replicas[: self._asked]
        return [turned[:_ASKED_WHEN_FULL]]

    def _pick(self, internal_id: str, request_id: str, hint: RequestHint) -> str | None:
        """The next replica to try: Ray Serve asks again when one does not answer."""
        tried = self._tried.setdefault(internal_id, set())
        for before in tried:  # It counts there no longer.
            self._request_ids.pop((internal_id, before), None)
        chosen = self._shared.pick(request_id, hint, tried)
        if chosen is not None:
            self._request_ids[internal_id, chosen] = request_id
            if chosen in tried:  # All others have been tried, or are full: begin anew.
                tried.clear()
            tried.add(chosen)
        return chosen

    def _settled(
        self,
        internal_id: str,
        request_id: str,
        hint: RequestHint,
        chosen: str | None,
        future: "asyncio.Future[RunningReplica]",
    ) -> None:
        """Ray Serve sends the request, perhaps elsewhere than chosen; or it was cancelled."""
        self._tried.pop(internal_id, None)
        actual = None if future.cancelled() else future.result().replica_id.unique_id
        if actual == chosen:
            return
        if chosen is not None:
            self._request_ids.pop((internal_id, chosen), None)
            self._shared.released(request_id, chosen)
        if actual is not None and (internal_id, actual) not in self._request_ids:
            self._request_ids[internal_id, actual] = request_id
            self._shared.moved(request_id, actual, hint)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request has left its replica: it ended, was refused there, or the replica died."""
        request_id = self._request_ids.pop((internal_request_id, replica_id.unique_id), None)
        if request_id is not None:
            self._shared.released(request_id, replica_id.unique_id)


def _identity(pending_request: PendingRequest) -> tuple[str, RequestHint]:
    """The request's id and hint; calls of other kinds have Ray Serve's id and say nothing."""
    for argument in (*pending_request.args, *pending_request.kwargs.values()):
        if isinstance(argument, RelayedRequest):
            request_id = argument.terms.request_id
            return request_id or pending_request.metadata.internal_request_id, argument.hint
    return pending_request.metadata.internal_request_id, RequestHint()
