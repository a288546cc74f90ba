"""The models that a gateway offers: their replicas, and the queue before them."""

import math

from apar_core.errors import RequestError
from deployments.account import Account
from deployments.answers import ReplicaCalls
from deployments.callers import Caller
from deployments.fair_queue import FairQueue, QueueState, Ticket
from deployments.gateway_settings import ServedModel


class UnknownModelError(RequestError):
    """The request names a model that is not served here, or not to its caller: HTTP 404."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown model {name}", param="model")
        self.name = name


class Model:
    """A served model: its replicas, and who may go to them in which order."""

    def __init__(self, settings: ServedModel, replicas: ReplicaCalls) -> None:
        self.settings = settings
        self.replicas = replicas
        # None until the router knows, which it does with the first request.
        self._num_running: int | None = None
        self._accounts: dict[str, Account] = {}
        self._queue = FairQueue(
            capacity=self._capacity,
            max_waiting=settings.max_queued,
            max_wait_s=settings.max_queue_s,
        )

    def reconfigure(self, settings: ServedModel, replicas: ReplicaCalls) -> None:
        """Take new settings; requests that run or wait go on."""
        self.settings = settings
        self.replicas = replicas
        self._queue.configure(
            capacity=self._capacity,
            max_waiting=settings.max_queued,
            max_wait_s=settings.max_queue_s,
        )

    def replicas_changed(self, num_running: int) -> None:
        """Make room for as many requests as this many replicas run."""
        # 0 before the first replica is known; a model that has lost all of them waits for one.
        if num_running or self._num_running is not None:
            self._num_running = num_running
            self._queue.resize(self._capacity)

    @property
    def state(self) -> QueueState:
        """How the model's queue stands."""
        return self._queue.state

    async def enter(self, caller: Caller) -> Ticket:
        """A place at the replicas, when the caller's turn comes; raises as `FairQueue.enter`."""
        account = self._accounts.get(caller.name)
        if account is None:
            account = self._accounts[caller.name] = Account(caller.name)
        if caller.key is not None:
            account.priority = caller.key.priority
            account.weight = caller.key.weight
            # Each request has a thread at least.
            account.max_running = caller.key.max_threads
        return await self._queue.enter(account)

    def max_threads_of(self, caller: Caller) -> int | None:
        """The caller's share of one replica: its threads, spread evenly over all that run."""
        if caller.key is None or caller.key.max_threads is None:
            return None
        return math.ceil(caller.key.max_threads / max(1, self._replicas))

    @property
    def _replicas(self) -> int:
        return self.settings.replicas if self._num_running is None else self._num_running

    @property
    def _capacity(self) -> int:
        return self._replicas * self.settings.requests_per_replica


def find_model(models: dict[str, Model], name: object, caller: Caller, *, needed: bool) -> Model:
    """The model that a request names; without a name, the only one that its caller may use.

    Raises UnknownModelError and RequestError. Where no name is `needed`, any model will do.
    """
    usable = [known for known in models if caller.may_use(known)]
    if name is None and usable:
        if needed and len(usable) > 1:
            served = ", ".join(usable)
            raise RequestError(f"`model` is missing; served here: {served}", param="model")
        return models[usable[0]]
    if not isinstance(name, str | None):
        raise RequestError("`model` must be a string", param="model")
    if name not in usable:
        raise UnknownModelError(name or "")
    return models[name]
