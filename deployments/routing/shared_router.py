"""The routers of this process, by deployment: where gateway and Ray's routers meet.

Ray Serve makes a router for every handle, and runs it in an executor of its own; all handles of a
deployment must count together, and only the gateway learns how a request ended. So the decision
itself lives here, one for each deployment, under a lock.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping

from cluster.config.routing import RoutingSettings
from deployments.routing.policies import build_router
from deployments.routing.policies import Reason
from deployments.wire.load import ReplicaLoad
from deployments.wire.answer import AnswerEnd
from deployments.wire.request import RequestHint

Clock = Callable[[], float]
CapacityListener = Callable[[int], None]

_MAX_DEAD = 1024


class SharedRouter:
    """The router of one deployment, for several executors; `now` is the clock of its reports."""

    def __init__(
        self, settings: RoutingSettings, *, seed: int | None = None, now: Clock = time.time
    ) -> None:
        self._settings = settings
        self._seed = time.time_ns() if seed is None else seed
        self._router = build_router(settings, self._seed)
        self._lock = threading.Lock()
        self._now = now
        self._capacity = self._told = 0
        # What each of Ray's routers says runs, and what has been found dead.
        self._caps: dict[int, Mapping[str, int]] = {}
        # Ray's routers that are gone, and not yet forgotten.
        self._gone: deque[int] = deque()
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._listeners: list[CapacityListener] = []

    def configure(self, settings: RoutingSettings) -> None:
        """Choose by other settings from now on; what is running goes on to count."""
        with self._lock:
            if settings != self._settings:
                router = build_router(settings, self._seed)
                router.adopt(self._router)
                self._settings, self._router = settings, router

    def replicas_changed(self, source: int, caps: Mapping[str, int]) -> None:
        """Take the running replicas with their caps from one of Ray's routers.

        A replica counts while all of them know it: they learn at different moments.
        """
        with self._lock:
            if self._caps.get(source) == caps and not self._gone:
                return
            self._caps[source] = caps
            self._apply()
        self._tell()

    def left(self, source: int) -> None:
        """One of Ray's routers is gone; its replicas count if all that are left know them.

        Python's garbage collector may call this in any executor, also in one that holds the lock
        at that moment. Then it is done with the next call.
        """
        self._gone.append(source)
        if self._lock.acquire(blocking=False):
            try:
                self._apply()
            finally:
                self._lock.release()
            self._tell()

    def died(self, replica_id: str) -> None:
        """A replica has been found dead; Ray's other routers may not know yet."""
        with self._lock:
            self._dead[replica_id] = None
            if len(self._dead) > _MAX_DEAD:
                self._dead.popitem(last=False)
            self._apply()
        self._tell()

    def _apply(self) -> None:
        while self._gone:
            self._caps.pop(self._gone.popleft(), None)
        each = [set(caps) for caps in self._caps.values()]
        known = set.intersection(*each) if each else set()
        latest = {name: cap for caps in self._caps.values() for name, cap in caps.items()}
        running = {name: latest[name] for name in latest if name in known - self._dead.keys()}
        self._router.replicas_changed(running)
        self._capacity = len(running)

    def _tell(self) -> None:
        """Tell the listeners how many run, if that has changed since they were told."""
        capacity = self._capacity
        if capacity != self._told:
            self._told = capacity
            for listener in list(self._listeners):
                listener(capacity)

    def reported(self, replica_id: str, load: ReplicaLoad) -> None:
        """Take a replica's report."""
        with self._lock:
            self._router.reported(replica_id, load, self._now())

    def pick(self, request_id: str, hint: RequestHint, avoid: Collection[str] = ()) -> str | None:
        """Choose a replica and count the request there at once; None if all are full.

        Replicas to `avoid` only where no other has room.
        """
        with self._lock:
            if self._gone:
                self._apply()
            now_s = self._now()
            # A request that was picked before and comes again is no longer where it was.
            self._router.released(request_id, now_s)
            chosen = self._router.choose(hint, now_s, avoid)
            if chosen is not None:
                self._router.sent(request_id, chosen, hint, now_s)
        self._tell()
        return chosen

    def moved(self, request_id: str, replica_id: str, hint: RequestHint) -> None:
        """Count a request where it has really been sent, if that is not where it was picked."""
        with self._lock:
            if self._router.replica_of(request_id) != replica_id:
                self._router.sent(request_id, replica_id, hint, self._now())

    def released(self, request_id: str, replica_id: str | None = None) -> None:
        """A request has left its replica (the named one, if any)."""
        with self._lock:
            self._router.released(request_id, self._now(), replica_id=replica_id)

    def ended(self, request_id: str, end: AnswerEnd | None) -> None:
        """A request is over, and this is what it brought."""
        with self._lock:
            self._router.ended(request_id, end, self._now())

    def listen(self, listener: CapacityListener) -> None:
        """Call with the number of running replicas, now and whenever it changes."""
        self._listeners.append(listener)
        listener(self._capacity)

    @property
    def capacity(self) -> int:
        """Running replicas."""
        return self._capacity

    def replica_of(self, request_id: str) -> str | None:
        """Where a request is now."""
        with self._lock:
            return self._router.replica_of(request_id)

    @property
    def num_sent(self) -> int:
        """Requests at replicas now."""
        return self._router.num_sent

    def decisions(self) -> dict[Reason, int]:
        """Decisions since the start, by reason."""
        with self._lock:
            return dict(self._router.decisions)


class Registry:
    """Shared routers by deployment name, each made when it is first asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routers: dict[str, SharedRouter] = {}
        self._waiting: dict[str, list[CapacityListener]] = {}

    def router(self, deployment: str, settings: RoutingSettings) -> SharedRouter:
        """The deployment's router; the settings count when it is made."""
        with self._lock:
            router = self._routers.get(deployment)
            if router is not None:
                return router
            router = self._routers[deployment] = SharedRouter(settings)
            waiting = self._waiting.pop(deployment, [])
        for listener in waiting:
            router.listen(listener)
        return router

    def configure(self, settings: RoutingSettings) -> None:
        """See the function `configure`."""
        for router in list(self._routers.values()):
            router.configure(settings)

    def ended(self, deployment: str, request_id: str, end: AnswerEnd | None) -> None:
        """See the function `ended`."""
        if router := self._routers.get(deployment):
            router.ended(request_id, end)

    def replica_of(self, deployment: str, request_id: str) -> str | None:
        """See the function `replica_of`."""
        router = self._routers.get(deployment)
        return None if router is None else router.replica_of(request_id)

    def capacity(self, deployment: str) -> int:
        """See the function `capacity`."""
        router = self._routers.get(deployment)
        return 0 if router is None else router.capacity

    def listen(self, deployment: str, listener: CapacityListener) -> None:
        """See the function `listen`."""
        with self._lock:
            router = self._routers.get(deployment)
            if router is None:
                self._waiting.setdefault(deployment, []).append(listener)
        if router is not None:
            router.listen(listener)

    def decisions(self) -> dict[str, dict[Reason, int]]:
        """See the function `decisions`."""
        return {name: router.decisions() for name, router in list(self._routers.items())}


# Ray Serve builds the routers from a class and a configuration, so nothing can be passed in.
PROCESS = Registry()


def ended(deployment: str, request_id: str, end: AnswerEnd | None) -> None:
    """Tell the deployment's router that a request is over, once for every request it was given.

    `end` is what the replica said of it, None where it said nothing. Without this the router
    would take a request that was cancelled on its way for one that runs for ever.
    """
    PROCESS.ended(deployment, request_id, end)


def replica_of(deployment: str, request_id: str) -> str | None:
    """Where a request was last sent; None where it is not known, or no longer."""
    return PROCESS.replica_of(deployment, request_id)


def configure(settings: RoutingSettings) -> None:
    """Let this process's routers choose by these settings from now on.

    Ray Serve gives a router its settings once, when it makes it.
    """
    PROCESS.configure(settings)


def capacity(deployment: str) -> int:
    """Replicas of a deployment that run and take requests; 0 before the first one is known."""
    return PROCESS.capacity(deployment)


def listen(deployment: str, listener: CapacityListener) -> None:
    """Call `listener` with `capacity(deployment)` whenever that changes, in any executor."""
    PROCESS.listen(deployment, listener)


def decisions() -> dict[str, dict[Reason, int]]:
    """Decisions of this process's routers since its start, by deployment and reason."""
    return PROCESS.decisions()
