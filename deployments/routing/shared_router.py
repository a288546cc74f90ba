"""The routers of this process, one per deployment, shared by the gateway and Ray Serve.

Ray Serve makes a router for each handle and runs it in an executor of its own. All handles of a
deployment must count together, and only the gateway learns how a request ended. So the decision is
made in one `SharedRouter` per deployment, under a lock; `ROUTERS` finds it.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping

from deployments.config.routing import RoutingSettings
from deployments.routing.policies import Reason, build_router
from deployments.wire.frames import Address
from deployments.wire.handshake import PROTOCOL
from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RequestHint
from deployments.wire.response import ResponseEnd

Clock = Callable[[], float]
CapacityListener = Callable[[int], None]

_MAX_DEAD = 1024


class SharedRouter:
    """Thread-safe router of one deployment; `now` must be the clock of the replicas' reports."""

    def __init__(
        self, settings: RoutingSettings, *, seed: int | None = None, now: Clock = time.time
    ) -> None:
        self._settings = settings
        self._seed = time.time_ns() if seed is None else seed
        self._router = build_router(settings, self._seed)
        self._lock = threading.Lock()
        self._now = now
        self._capacity = 0
        # Running replicas according to each of Ray's routers.
        self._caps: dict[object, Mapping[str, int]] = {}
        # Ray's routers that were garbage-collected and are still in `_caps`.
        self._gone: deque[object] = deque()
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._listeners: list[CapacityListener] = []
        self._addresses: dict[str, Address] = {}

    def configure(self, settings: RoutingSettings) -> None:
        """Change the settings; running requests stay counted."""
        with self._lock:
            if settings != self._settings:
                router = build_router(settings, self._seed)
                router.adopt(self._router)
                self._settings, self._router = settings, router

    def replicas_changed(self, source: object, caps: Mapping[str, int]) -> None:
        """Take the running replicas and their caps from `source`, one of Ray's routers.

        Ray's routers learn of a change at different moments. A replica counts while all know it.
        """
        with self._lock:
            if self._caps.get(source) == caps and not self._gone:
                return
            self._caps[source] = caps
            self._apply()

    def left(self, source: object) -> None:
        """Forget one of Ray's routers; called when it is garbage-collected.

        That may happen in any executor. If it holds the lock, the next call applies the change.
        """
        self._gone.append(source)
        if self._lock.acquire(blocking=False):
            try:
                self._apply()
            finally:
                self._lock.release()

    def died(self, replica_id: str) -> None:
        """Exclude a dead replica, which Ray's other routers may still list."""
        with self._lock:
            self._dead[replica_id] = None
            if len(self._dead) > _MAX_DEAD:
                self._dead.popitem(last=False)
            self._apply()

    def _apply(self) -> None:
        while self._gone:
            self._caps.pop(self._gone.popleft(), None)
        each = [set(caps) for caps in self._caps.values()]
        known = set.intersection(*each) if each else set()
        latest = {name: cap for caps in self._caps.values() for name, cap in caps.items()}
        running = {name: latest[name] for name in latest if name in known - self._dead.keys()}
        self._addresses = {name: at for name, at in self._addresses.items() if name in latest}
        self._router.replicas_changed(running)
        if len(running) != self._capacity:
            self._capacity = len(running)
            # Under the lock, so that listeners hear changes of several executors in their order.
            for listener in self._listeners:
                listener(self._capacity)

    def reported(self, replica_id: str, load: ReplicaLoad) -> None:
        """Take a replica's report."""
        with self._lock:
            is_new = replica_id not in self._addresses
            if is_new and load.address is not None and load.protocol == PROTOCOL:
                self._addresses[replica_id] = Address.from_text(load.address)
            self._router.reported(replica_id, load, self._now())

    def assign(self, request_id: str, hint: RequestHint, avoid: Collection[str] = ()) -> str | None:
        """Choose a replica and count the request there at once; None if all are full.

        Replicas in `avoid` are chosen only if no other has room.
        """
        with self._lock:
            if self._gone:
                self._apply()
            now_s = self._now()
            # On a retry the request is no longer at its first replica.
            self._router.released(request_id, now_s)
            chosen = self._router.choose(hint, avoid)
            if chosen is not None:
                self._router.sent(request_id, chosen, hint, now_s)
        return chosen

    def moved(self, request_id: str, replica_id: str, hint: RequestHint) -> None:
        """Count a request where it was actually sent, if not where it was assigned."""
        with self._lock:
            if self._router.replica_of(request_id) != replica_id:
                self._router.sent(request_id, replica_id, hint, self._now())

    def released(self, request_id: str, replica_id: str | None = None) -> None:
        """Stop counting a request at its replica, or only at the named one."""
        with self._lock:
            self._router.released(request_id, self._now(), replica_id=replica_id)

    def ended(self, request_id: str, end: ResponseEnd | None) -> None:
        """Forget a finished request and learn its cost, if that is known."""
        with self._lock:
            self._router.ended(request_id, end, self._now())

    def address_of(self, replica_id: str) -> Address | None:
        """Return where to call a replica; None for Ray Serve's handle."""
        with self._lock:
            return self._addresses.get(replica_id) if self._settings.direct else None

    @property
    def addresses(self) -> set[Address]:
        """The known addresses of the replicas."""
        with self._lock:
            return set(self._addresses.values())

    def listen(self, listener: CapacityListener) -> None:
        """Call `listener` with the number of running replicas, now and whenever it changes.

        The listener must not call this router.
        """
        with self._lock:
            self._listeners.append(listener)
            listener(self._capacity)

    @property
    def capacity(self) -> int:
        """Number of running replicas."""
        return self._capacity

    def replica_of(self, request_id: str) -> str | None:
        """Return the replica where a request is counted now."""
        with self._lock:
            return self._router.replica_of(request_id)

    @property
    def num_sent(self) -> int:
        """Number of requests at replicas now."""
        return self._router.num_sent

    def decisions(self) -> dict[Reason, int]:
        """Return the number of decisions since the start, by reason."""
        with self._lock:
            return dict(self._router.decisions)


class Routers:
    """Shared routers by deployment name, each created when Ray Serve first asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routers: dict[str, SharedRouter] = {}
        self._waiting: dict[str, list[CapacityListener]] = {}

    def router(self, deployment: str, settings: RoutingSettings) -> SharedRouter:
        """Return the deployment's router; the settings apply only when it is made."""
        with self._lock:
            router = self._routers.get(deployment)
            if router is not None:
                return router
            router = self._routers[deployment] = SharedRouter(settings)
            waiting = self._waiting.pop(deployment, [])
        for listener in waiting:
            router.listen(listener)
        return router

    def known(self, deployment: str) -> SharedRouter | None:
        """Return the deployment's router, None before Ray Serve has asked for it."""
        return self._routers.get(deployment)

    def configure(self, settings: RoutingSettings) -> None:
        """Change the settings of all routers; Ray Serve sets them only when it makes a router."""
        for router in list(self._routers.values()):
            router.configure(settings)

    def ended(self, deployment: str, request_id: str, end: ResponseEnd | None) -> None:
        """Report the end of a request, exactly once for each one that was sent.

        `end` is its cost, None if unknown. Without this call a request that was cancelled on its
        way to the replica would count as running forever.
        """
        if router := self._routers.get(deployment):
            router.ended(request_id, end)

    def replica_of(self, deployment: str, request_id: str) -> str | None:
        """Return the replica where a request is counted now; None if unknown."""
        router = self._routers.get(deployment)
        return None if router is None else router.replica_of(request_id)

    def capacity(self, deployment: str) -> int:
        """Return the running replicas of a deployment; 0 before the first one is known."""
        router = self._routers.get(deployment)
        return 0 if router is None else router.capacity

    def listen(self, deployment: str, listener: CapacityListener) -> None:
        """Call `listener` with the capacity whenever it changes, in any executor."""
        with self._lock:
            router = self._routers.get(deployment)
            if router is None:
                self._waiting.setdefault(deployment, []).append(listener)
        if router is not None:
            router.listen(listener)

    def decisions(self) -> dict[str, dict[Reason, int]]:
        """Return the number of decisions since the start, by deployment and reason."""
        return {name: router.decisions() for name, router in list(self._routers.items())}


ROUTERS = Routers()
"""The routers of this process; Ray Serve builds its own from a class, so none can be passed in."""
